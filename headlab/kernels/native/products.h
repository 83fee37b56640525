// Matrix products on packed panels: a right side is stored as panels of PANEL columns, [panel][depth][PANEL].
#pragma once

#include <algorithm>

#include "vectors.h"

namespace headlab {

constexpr int64_t PANEL = 2 * LANES;

inline int64_t panels(int64_t columns) { return (columns + PANEL - 1) / PANEL; }
inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Rows x[0..rows), each `depth` wide, become the columns of a right side: what a product with x^T reads.
inline void pack_transposed(
    const float* x, int64_t stride, int64_t first, int64_t rows, int64_t depth, float* panel) {
    for (int64_t j = 0; j < PANEL; ++j) {
        const float* row = x + (first + j) * stride;
        bool inside = first + j < rows;
        for (int64_t k = 0; k < depth; ++k) panel[k * PANEL + j] = inside ? row[k] : 0.0f;
    }
}

// One panel of x itself as a right side: columns [first, first + PANEL) of every row.
inline void pack(
    const float* x, int64_t stride, int64_t rows, int64_t first, int64_t width, float* panel) {
    int64_t used = std::min(PANEL, width - first);
    for (int64_t k = 0; k < rows; ++k) {
        std::copy_n(x + k * stride + first, used, panel + k * PANEL);
        std::fill(panel + k * PANEL + used, panel + (k + 1) * PANEL, 0.0f);
    }
}

// out[ROWS][PANEL] (+)= a[ROWS][depth] @ panel[depth][PANEL], all of out in registers.
template <int ROWS, bool ADD>
inline void multiply_tile(const float* a, int64_t a_stride, const float* panel, int64_t depth,
                          float* out, int64_t out_stride) {
    Vec left[ROWS], right[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
        left[r] = ADD ? load(out + r * out_stride) : Vec{};
        right[r] = ADD ? load(out + r * out_stride + LANES) : Vec{};
    }
    for (int64_t k = 0; k < depth; ++k) {
        Vec x = load(panel + k * PANEL), y = load(panel + k * PANEL + LANES);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            float weight = a[r * a_stride + k];
            left[r] += weight * x;
            right[r] += weight * y;
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
        store(out + r * out_stride, left[r]);
        store(out + r * out_stride + LANES, right[r]);
    }
}

// The same for any number of rows.
template <bool ADD>
inline void multiply(const float* a, int64_t a_stride, int64_t rows, const float* panel,
                     int64_t depth, float* out, int64_t out_stride) {
    int64_t r = 0;
    for (; r + TILE_ROWS <= rows; r += TILE_ROWS)
        multiply_tile<TILE_ROWS, ADD>(
            a + r * a_stride, a_stride, panel, depth, out + r * out_stride, out_stride);
    for (; r + 4 <= rows; r += 4)
        multiply_tile<4, ADD>(
            a + r * a_stride, a_stride, panel, depth, out + r * out_stride, out_stride);
    for (; r < rows; ++r)
        multiply_tile<1, ADD>(
            a + r * a_stride, a_stride, panel, depth, out + r * out_stride, out_stride);
}

}  // namespace headlab
