// One attention call as Python hands it over. Every field takes 8 bytes; call.py lists the same in the same order.
#pragma once

#include <cstdint>

namespace headlab {

struct Call {
    // Sizes.
    int64_t batch, heads, kv_heads, queries, keys, width, value_width, threads;
    int64_t diagonal;  // key column at the position of query row 0
    // Heads to run, and where each one's statistics go (-1: nowhere).
    int64_t n_run, n_slots;
    const int64_t *run, *slot;  // [n_run]
    double scaling, softcap;    // no soft cap: 0
    // Inputs: [batch, head, row, ...] with strides in elements; the last axis is contiguous.
    const float *q, *k, *v, *sinks, *z_gradient;
    int64_t q_batch, q_head, q_row;
    int64_t k_batch, k_head, k_row;
    int64_t v_batch, v_head, v_row;
    int64_t dz_batch, dz_head, dz_row;
    // Visibility; a stride of 0 broadcasts.
    const int32_t *low, *high;
    const uint8_t* mask;
    const float* bias;
    int64_t interval_batch;
    int64_t mask_batch, mask_head, mask_row;
    int64_t bias_batch, bias_head, bias_row;
    // Parameters of statistics.
    const float* features;  // [batch|1, feature, key]
    const float* segments;  // [batch|1, segment, key], 1 for members
    const int64_t* targets;  // [batch|1, query], -1 for none
    const uint8_t* counted;  // [batch|1, query]
    const int64_t* edges;    // [n_bins + 1]
    int64_t n_features, n_segments, n_bins, k_largest, local_window, block;
    int64_t features_batch, segments_batch, targets_batch, counted_batch;
    // Results, null where not asked for: statistics are [batch, slot, query, ...], contiguous.
    float* z;  // [batch, query, head, value_width]
    float *lse, *entropy, *max, *topk, *feature, *local_mass, *lag_mass, *mean_distance;
    float *target_mass, *segment_z;
    float *received, *block_map;  // [batch, slot, key] and [batch, slot, query square, key square], zeroed
    int64_t *argmax, *topk_index;
};

}  // namespace headlab
