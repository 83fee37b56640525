// Exact attention with statistics of the pattern, for the CPU: one pass over blocks of query rows.
//
// A block holds complete rows of scores, so that z, every row statistic and the column sums come from the same
// weights. Work is cut into shares that do not depend on the number of threads, and column sums are added in the
// order of the shares: results do not depend on it either.

#include "packed.h"
#include "rows.h"

namespace headlab {
namespace {

constexpr int64_t KEY_TILE = 128;         // keys whose weights and values are mixed while in the first cache
constexpr int64_t BLOCK_FLOATS = 98304;   // scores in a block: it should stay in the second cache
constexpr int64_t BLOCK_ROWS = 48;
constexpr int64_t SHARES = 64;            // pieces of work, over all heads

// What a thread works in.
struct Scratch {
    Scratch(const Call& call, int64_t rows, int64_t stride)
        : scores(rows * stride),
          products(call.z_gradient ? rows * stride : 0),
          scaled(rows * std::max(call.width, call.value_width)),
          masked(call.segment_z ? rows * KEY_TILE : 0),
          mixed((1 + call.n_segments) * rows * panels(call.value_width) * PANEL),
          share(rows),
          weight(rows),
          // Of a request for the argmax alone, the largest is enough.
          best(call.topk || call.topk_index ? call.k_largest : 1) {}
    Buffer scores, products, scaled, masked, mixed;
    std::vector<float> share, weight;
    Candidates best;
};

class Attention {
public:
    Attention(const Call& call, const Packed& packed)
        : call(call),
          packed(packed),
          unit(call.block_map ? call.block * std::max<int64_t>(1, 64 / call.block) : 64),
          n_units((call.queries + unit - 1) / unit),
          shares(std::min(n_units, std::max<int64_t>(1, SHARES / (call.batch * call.n_run)))),
          // An odd number of cache lines, so that rows do not fall into the same set.
          stride(panels(call.keys + PANEL) * PANEL + 16),
          block_rows(std::min(call.queries, std::clamp(BLOCK_FLOATS / stride / TILE_ROWS * TILE_ROWS,
                                                       int64_t(TILE_ROWS), BLOCK_ROWS))),
          columns(call.received ? call.batch * call.n_slots * shares * call.keys : 0) {
        find_feature_ends();
    }

    int64_t items() const { return call.batch * call.n_run * shares; }
    std::unique_ptr<Scratch> state() const {
        return std::make_unique<Scratch>(call, block_rows, stride);
    }

    // A share is every `shares`-th unit of rows: under a causal mask, all are about as long.
    void operator()(int64_t item, Scratch& scratch) const {
        const int64_t share = item % shares, at = item / shares;
        const int64_t b = at / call.n_run, run = at % call.n_run;
        float* received = nullptr;
        if (call.received && call.slot[run] >= 0) {
            received = columns.floats + ((b * call.n_slots + call.slot[run]) * shares + share) * call.keys;
            std::fill_n(received, call.keys, 0.0f);
        }
        for (int64_t u = share; u < n_units; u += shares) {
            const int64_t stop = std::min((u + 1) * unit, call.queries);
            for (int64_t row = u * unit; row < stop; row += block_rows)
                attend(scratch, b, run, row, std::min(row + block_rows, stop), received);
        }
    }

    void add_shares() const {
        if (!call.received) return;
        for (int64_t at = 0; at < call.batch * call.n_slots; ++at)
            for (int64_t share = 0; share < shares; ++share) {
                const float* part = columns.floats + (at * shares + share) * call.keys;
                for (int64_t j = 0; j < call.keys; ++j) call.received[at * call.keys + j] += part[j];
            }
    }

private:
    // A block of rows [start, stop) of one head, against key columns [first, last).
    struct Block {
        int64_t b, head, slot, start, stop, first, last;
        int64_t rows() const { return stop - start; }
    };

    void find_feature_ends() {
        if (!call.feature) return;
        const int64_t batches = call.features_batch ? call.batch : 1;
        feature_ends.assign(2 * batches * call.n_features, 0);
        for (int64_t f = 0; f < batches * call.n_features; ++f) {
            const float* x = call.features + f * call.keys;
            int64_t low = 0, high = call.keys;
            while (low < high && x[low] == 0.0f) ++low;
            while (low < high && x[high - 1] == 0.0f) --high;
            feature_ends[2 * f] = low;
            feature_ends[2 * f + 1] = high;
        }
    }

    void attend(Scratch& scratch, int64_t b, int64_t run, int64_t start, int64_t stop,
                float* received) const {
        Block block{b, call.run[run], call.slot[run], start, stop, call.keys, 0};
        for (int64_t i = start; i < stop; ++i)
            if (low(b, i) < high(b, i)) {
                block.first = std::min<int64_t>(block.first, low(b, i));
                block.last = std::max<int64_t>(block.last, high(b, i));
            }
        if (block.last == 0) block.first = 0;  // blind: one panel, of weights 0
        block.first = block.first / PANEL * PANEL;
        block.last = round_up(std::max(block.last, block.first + 1), PANEL);
        const int64_t kv = block.head / (call.heads / call.kv_heads);
        multiply_rows(scratch, block, call.q + b * call.q_batch + block.head * call.q_head, call.q_row,
                      call.width, float(call.scaling), packed.keys(b, kv), scratch.scores.floats);
        if (call.z_gradient)
            multiply_rows(scratch, block, call.z_gradient + b * call.dz_batch + block.head * call.dz_head,
                          call.dz_row, call.value_width, 1.0f, packed.transposed(b, kv),
                          scratch.products.floats);
        for (int64_t i = start; i < stop; ++i) finish_row(scratch, block, i);
        const bool columns = block.slot >= 0 && (received || call.block_map);
        const bool segments = block.slot >= 0 && call.segment_z;
        for (int64_t low = block.first; low < block.last; low += KEY_TILE) {
            const int64_t high = std::min({low + KEY_TILE, block.last, call.keys});
            if (columns) add_columns(scratch, block, low, high, received);
            if (call.z)
                mix(scratch, block, packed.values(b, kv), low, high, 0,
                    scratch.scores.floats + low - block.first, stride);
            if (segments) mix_segments(scratch, block, packed.values(b, kv), low, high);
        }
        write_mixed(scratch, block);
    }

    int32_t low(int64_t b, int64_t i) const { return call.low[b * call.interval_batch + i]; }
    int32_t high(int64_t b, int64_t i) const { return call.high[b * call.interval_batch + i]; }

    // out = factor * x @ right over the block's key columns; x holds the block's rows of the call.
    void multiply_rows(Scratch& scratch, const Block& block, const float* x, int64_t x_row, int64_t depth,
                       float factor, const float* right, float* out) const {
        float* left = scratch.scaled.floats;
        for (int64_t r = 0; r < block.rows(); ++r)
            for (int64_t k = 0; k < depth; ++k)
                left[r * depth + k] = factor * x[(block.start + r) * x_row + k];
        for (int64_t column = block.first; column < block.last; column += PANEL)
            multiply<false>(left, depth, block.rows(), right + column * depth, depth,
                            out + column - block.first, stride);
    }

    // Scores of query row i become weights, and its statistics are written.
    void finish_row(Scratch& scratch, const Block& block, int64_t i) const {
        const int64_t r = i - block.start, width = block.last - block.first;
        float* s = scratch.scores.floats + r * stride;
        const int64_t from = low(block.b, i), to = high(block.b, i);
        const int64_t begin = from / LANES * LANES - block.first;
        const int64_t end = round_up(to, LANES) - block.first;
        const float* sink = call.sinks ? call.sinks + block.head : nullptr;
        const int64_t at = (block.b * call.n_slots + block.slot) * call.queries + i;
        scratch.share[r] = scratch.weight[r] = 0.0f;
        Vec classes[CLASSES];
        float top = -INF;
        Row row{s, block.first, 0, from, to, i + call.diagonal};
        if (from < to) {
            row = Row{s + begin, block.first + begin, end - begin, from, to, i + call.diagonal};
            complete_scores(block, i, row);
            top = row_maximum(row, classes);
            if (top == -INF && has_nan(row)) top = std::numeric_limits<float>::quiet_NaN();
        }
        if (top == -INF) {
            std::fill_n(s, width, 0.0f);
            if (block.slot < 0) return;
            write_blind(call, sink, at, scratch.best);
            row.high = row.low;
            write_masses(call, row, 0.0f, at, block.b, i, ends(block.b));
            return;
        }
        std::fill_n(s, begin, 0.0f);
        std::fill_n(s + end, width - end, 0.0f);
        if (block.slot >= 0 && (call.topk || call.topk_index || call.argmax))
            row_largest(row, classes, scratch.best);
        const Softmax softmax = row_softmax(call, row, top, sink);
        scratch.share[r] = softmax.share;
        if (block.slot < 0) return;
        write_shape(call, softmax, at, scratch.best);
        if (call.z_gradient) weigh_by_gradient(row, scratch.products.floats + r * stride + begin);
        write_masses(call, row, softmax.share, at, block.b, i, ends(block.b));
        const bool counts = !call.counted || call.counted[block.b * call.counted_batch + i];
        scratch.weight[r] = counts ? softmax.share : 0.0f;
    }

    const int64_t* ends(int64_t b) const {
        return feature_ends.data() + (call.features_batch ? 2 * b * call.n_features : 0);
    }

    // Soft cap, bias and mask, in this order; -inf where a key is hidden.
    void complete_scores(const Block& block, int64_t i, const Row& row) const {
        if (call.softcap != 0.0) {
            const float cap = float(call.softcap);
            for (int64_t j = 0; j < row.n; j += LANES)
                store(row.s + j, cap * hyperbolic_tangent(load(row.s + j) * (1.0f / cap)));
        }
        float* s = row.at(0);
        if (call.bias) {
            const float* bias = call.bias + block.b * call.bias_batch +
                                block.head * call.bias_head + i * call.bias_row;
            for (int64_t j = row.low; j < row.high; ++j) s[j] += bias[j];
        }
        if (call.mask) {
            const uint8_t* mask = call.mask + block.b * call.mask_batch +
                                  block.head * call.mask_head + i * call.mask_row;
            for (int64_t j = row.low; j < row.high; ++j) s[j] = mask[j] ? s[j] : -INF;
        }
        for (int64_t j = row.first; j < row.low; ++j) s[j] = -INF;
        for (int64_t j = row.high; j < row.first + row.n; ++j) s[j] = -INF;
    }

    static bool has_nan(const Row& row) {
        for (int64_t j = 0; j < row.n; ++j)
            if (row.s[j] != row.s[j]) return true;
        return false;
    }

    static void weigh_by_gradient(const Row& row, const float* gradient) {
        for (int64_t j = 0; j < row.n; j += LANES) {
            Vec weight = load(row.s + j);
            store(row.s + j, weight == 0.0f ? weight : weight * load(gradient + j));
        }
    }

    // Sums over the block's counted rows, of key columns [low, high).
    void add_columns(Scratch& scratch, const Block& block, int64_t low, int64_t high, float* received) const {
        const int64_t side = call.block_map ? call.block : call.queries;
        for (int64_t start = block.start; start < block.stop;) {
            const int64_t stop = std::min((start / side + 1) * side, block.stop);
            float sums[KEY_TILE];
            for (int64_t j = low; j < high; j += LANES) {
                Vec total{};
                for (int64_t i = start; i < stop; ++i) {
                    const int64_t r = i - block.start;
                    total += scratch.weight[r] * load(scratch.scores.floats + r * stride + j - block.first);
                }
                store(sums + j - low, total);
            }
            if (received)
                for (int64_t j = low; j < high; ++j) received[j] += sums[j - low];
            if (call.block_map) {
                const int64_t down = (call.queries + side - 1) / side;
                const int64_t across = (call.keys + side - 1) / side;
                const int64_t at_head = block.b * call.n_slots + block.slot;
                float* squares = call.block_map + (at_head * down + start / side) * across;
                for (int64_t j = low; j < high;) {
                    const int64_t next = std::min((j / side + 1) * side, high);
                    squares[j / side] += sum(sums + j - low, next - j);
                    j = next;
                }
            }
            start = stop;
        }
    }

    // Adds the values of keys [low, high), weighted, to sum `which` of the block's rows.
    void mix(Scratch& scratch, const Block& block, const float* values, int64_t low, int64_t high,
             int64_t which, const float* weights, int64_t weights_stride) const {
        const int64_t n_panels = panels(call.value_width);
        float* out = scratch.mixed.floats + which * block_rows * n_panels * PANEL;
        for (int64_t c = 0; c < n_panels; ++c) {
            const float* panel = values + (c * call.keys + low) * PANEL;
            const auto product = low == block.first ? multiply<false> : multiply<true>;
            product(weights, weights_stride, block.rows(), panel, high - low, out + c * PANEL, n_panels * PANEL);
        }
    }

    // The same for every segment, with the weights of its members alone.
    void mix_segments(Scratch& scratch, const Block& block, const float* values, int64_t low, int64_t high) const {
        const float* scores = scratch.scores.floats + low - block.first;
        for (int64_t g = 0; g < call.n_segments; ++g) {
            const float* member = call.segments + block.b * call.segments_batch + g * call.keys + low;
            const float members = sum(member, high - low);
            if (members == 0.0f && low > block.first) continue;
            if (members == float(high - low)) {
                mix(scratch, block, values, low, high, 1 + g, scores, stride);
                continue;
            }
            float* masked = scratch.masked.floats;
            for (int64_t r = 0; r < block.rows(); ++r)
                for (int64_t j = 0; j < high - low; ++j)
                    masked[r * KEY_TILE + j] = member[j] != 0.0f ? scores[r * stride + j] : 0.0f;
            mix(scratch, block, values, low, high, 1 + g, masked, KEY_TILE);
        }
    }

    void write_mixed(const Scratch& scratch, const Block& block) const {
        const int64_t width = call.value_width, padded = panels(width) * PANEL;
        const int64_t n_sums = block.slot >= 0 && call.segment_z ? call.n_segments : 0;
        for (int64_t r = 0; r < block.rows(); ++r) {
            const int64_t i = block.start + r;
            auto write = [&](int64_t which, float* out) {
                const float* x = scratch.mixed.floats + (which * block_rows + r) * padded;
                for (int64_t d = 0; d < width; ++d) out[d] = scratch.share[r] * x[d];
            };
            if (call.z) write(0, call.z + ((block.b * call.queries + i) * call.heads + block.head) * width);
            const int64_t at = (block.b * call.n_slots + block.slot) * call.queries + i;
            for (int64_t g = 0; g < n_sums; ++g) write(1 + g, call.segment_z + (at * n_sums + g) * width);
        }
    }

    const Call& call;
    const Packed& packed;
    const int64_t unit, n_units, shares, stride, block_rows;
    Buffer columns;
    std::vector<int64_t> feature_ends;
};

}  // namespace
}  // namespace headlab

extern "C" {

int64_t headlab_call_size() { return sizeof(headlab::Call); }

// 0 when done, 1 when memory ran out.
int headlab_attend(const headlab::Call* call) {
    try {
        headlab::Packed packed(*call);
        if (!headlab::parallel(packed.items(), call->threads, packed)) return 1;
        headlab::Attention attention(*call, packed);
        if (!headlab::parallel(attention.items(), call->threads, attention)) return 1;
        attention.add_shares();
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}
}
