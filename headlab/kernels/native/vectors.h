// Vectors of floats as the compiler knows them, as wide as the machine's registers, and functions of them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace headlab {

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int TILE_ROWS = 12;  // 12 x 2 accumulators of 32 registers
#elif defined(__AVX__)
constexpr int LANES = 8;
constexpr int TILE_ROWS = 6;  // 6 x 2 accumulators of 16 registers
#else
constexpr int LANES = 4;
constexpr int TILE_ROWS = 12;
#endif

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t IntVec __attribute__((vector_size(4 * LANES)));

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float LOWEST_EXPONENT = -87.0f;  // e^x of less is no normal float: it counts as 0

inline Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

inline Vec fill(float x) { return x - Vec{}; }

// Of a NaN and a number, the first argument.
inline Vec maximum(Vec a, Vec b) { return b > a ? b : a; }

inline float sum(Vec v) {
    float lane[LANES];
    store(lane, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
    return lane[0];
}

inline float largest(Vec v) {
    float best = -INF;
    for (int i = 0; i < LANES; ++i) best = v[i] > best ? v[i] : best;
    return best;
}

inline Vec iota() {
    Vec v;
    for (int i = 0; i < LANES; ++i) v[i] = float(i);
    return v;
}

// e^x for LOWEST_EXPONENT <= x <= 0, and 0 at LOWEST_EXPONENT itself; relative error below 2e-7. NaN stays NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by the minimax polynomial of Cephes' expf (Moshier, 1992).
inline Vec exponential(Vec x) {
    const float round = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    Vec shifted = x * 1.44269504088896341f + round;
    Vec n = shifted - round;
    Vec r = x - n * 0.693359375f;  // ln 2 in two parts; the first has few bits, so that n times it is exact
    r = r + n * 2.12194440e-4f;
    Vec y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + (r + 1.0f);
    IntVec power, bits;
    std::memcpy(&power, &shifted, sizeof power);
    std::memcpy(&bits, &y, sizeof bits);
    bits += power << 23;  // times 2^n
    std::memcpy(&y, &bits, sizeof y);
    return x == LOWEST_EXPONENT ? Vec{} : y;
}

inline Vec at_least_lowest(Vec x) { return x < LOWEST_EXPONENT ? fill(LOWEST_EXPONENT) : x; }

// tanh to about 2e-7 relative: Cephes' polynomial near 0, exponentials elsewhere.
inline Vec hyperbolic_tangent(Vec x) {
    Vec size = x < 0.0f ? -x : x;
    Vec square = x * x;
    Vec near = square * -5.70498872745e-3f + 2.06390887954e-2f;
    near = near * square - 5.37397155531e-2f;
    near = near * square + 1.33314422036e-1f;
    near = near * square - 3.33332819422e-1f;
    near = near * square * x + x;
    Vec decay = exponential(at_least_lowest(-2.0f * size));
    Vec far = (1.0f - decay) / (1.0f + decay);
    far = x < 0.0f ? -far : far;
    return size < 0.625f ? near : far;
}

// Sum of p[0..n).
inline float sum(const float* p, int64_t n) {
    Vec a{}, b{};
    int64_t j = 0;
    for (; j + 2 * LANES <= n; j += 2 * LANES) {
        a += load(p + j);
        b += load(p + j + LANES);
    }
    float total = j ? sum(a + b) : 0.0f;
    for (; j < n; ++j) total += p[j];
    return total;
}

// Inner product of a[0..n) and b[0..n).
inline float dot(const float* a, const float* b, int64_t n) {
    Vec x{}, y{};
    int64_t j = 0;
    for (; j + 2 * LANES <= n; j += 2 * LANES) {
        x += load(a + j) * load(b + j);
        y += load(a + j + LANES) * load(b + j + LANES);
    }
    float total = j ? sum(x + y) : 0.0f;
    for (; j < n; ++j) total += a[j] * b[j];
    return total;
}

}  // namespace headlab
