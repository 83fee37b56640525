// The right sides of all products of a call, packed once.
#pragma once

#include "call.h"
#include "parallel.h"
#include "products.h"

namespace headlab {

// Keys, values and, for gradient-weighted statistics, transposed values, packed for the products.
class Packed {
public:
    explicit Packed(const Call& call)
        : call(call),
          key_floats(panels(call.keys) * PANEL * call.width),
          value_floats(panels(call.value_width) * PANEL * call.keys),
          transposed_floats(panels(call.keys) * PANEL * call.value_width),
          mixes(call.z || call.segment_z),
          keys_(call.batch * call.kv_heads * key_floats),
          values_(mixes ? call.batch * call.kv_heads * value_floats : 0),
          transposed_(call.z_gradient ? call.batch * call.kv_heads * transposed_floats : 0) {}

    const float* keys(int64_t b, int64_t kv) const { return at(keys_, b, kv, key_floats); }
    const float* values(int64_t b, int64_t kv) const { return at(values_, b, kv, value_floats); }
    const float* transposed(int64_t b, int64_t kv) const {
        return at(transposed_, b, kv, transposed_floats);
    }

    // One item packs a panel of keys of one key/value head, or, as the last of a head's items, its values.
    int64_t items() const { return call.batch * call.kv_heads * (panels(call.keys) + 1); }
    std::unique_ptr<int> state() const { return std::make_unique<int>(0); }
    void operator()(int64_t item, int&) const {
        const int64_t panel = item % (panels(call.keys) + 1), at_head = item / (panels(call.keys) + 1);
        const int64_t b = at_head / call.kv_heads, kv = at_head % call.kv_heads;
        const float* k = call.k + b * call.k_batch + kv * call.k_head;
        const float* v = call.v + b * call.v_batch + kv * call.v_head;
        if (panel < panels(call.keys)) {
            pack_transposed(k, call.k_row, panel * PANEL, call.keys, call.width,
                            at(keys_, b, kv, key_floats) + panel * PANEL * call.width);
            if (call.z_gradient)
                pack_transposed(
                    v, call.v_row, panel * PANEL, call.keys, call.value_width,
                    at(transposed_, b, kv, transposed_floats) + panel * PANEL * call.value_width);
        } else if (mixes) {
            for (int64_t c = 0; c < panels(call.value_width); ++c)
                pack(v, call.v_row, call.keys, c * PANEL, call.value_width,
                     at(values_, b, kv, value_floats) + c * PANEL * call.keys);
        }
    }

private:
    float* at(const Buffer& buffer, int64_t b, int64_t kv, int64_t size) const {
        return buffer.floats + (b * call.kv_heads + kv) * size;
    }
    const Call& call;
    int64_t key_floats, value_floats, transposed_floats;
    bool mixes;
    Buffer keys_, values_, transposed_;
};

}  // namespace headlab
