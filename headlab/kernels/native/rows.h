// The statistics of one complete row of scores.
#pragma once

#include <vector>

#include "call.h"
#include "products.h"

namespace headlab {

constexpr int CLASSES = 8;       // vectors of running maxima: column j falls into class j mod 8 LANES
constexpr int64_t RUN = 32 * LANES;  // columns summed in one go before their sum joins the total: keeps digits

// One row s[0..n), which stands for key columns [first, first + n); n is a multiple of LANES. Hidden: -inf.
struct Row {
    float* s;
    int64_t first, n;
    int64_t low, high;  // visible columns lie in [low, high)
    int64_t position;   // key column at the row's own position
    float* at(int64_t column) const { return s + (column - first); }
};

// Softmax of a row: weights are e^(s - top) * share.
struct Softmax {
    float top, own, share, log_total, lse;
    float spread, distance;  // sums of e (s - top) and of e |lag|
};

// Largest score, and the largest of each class.
inline float row_maximum(const Row& row, Vec classes[CLASSES]) {
    for (int c = 0; c < CLASSES; ++c) classes[c] = fill(-INF);
    int64_t j = 0;
    for (; j + CLASSES * LANES <= row.n; j += CLASSES * LANES)
#pragma GCC unroll 8
        for (int c = 0; c < CLASSES; ++c)
            classes[c] = maximum(classes[c], load(row.s + j + c * LANES));
    for (int c = 0; j < row.n; j += LANES, ++c) classes[c] = maximum(classes[c], load(row.s + j));
    Vec best = classes[0];
    for (int c = 1; c < CLASSES; ++c) best = maximum(best, classes[c]);
    return largest(best);
}

// Scores that may be among the k largest of a row, with their columns.
struct Candidates {
    explicit Candidates(int64_t most)
        : k(std::max<int64_t>(most, 1)),
          room(k + std::max(k, CHUNK) + CHUNK),
          value(room),
          column(room),
          order(room) {}

    void clear(float reach) {
        count = 0;
        bar = reach;
        last = std::numeric_limits<int32_t>::max();
    }

    // Takes of s[0], s[step], ... those that may yet be among the k largest.
    void take(const float* s, int64_t n, int64_t step, int64_t first) {
        for (int64_t start = 0; start < n; start += CHUNK * step) {
            const int64_t stop = std::min(start + CHUNK * step, n);
            if (count + CHUNK > room) sort();
            for (int64_t j = start; j < stop; j += step) {
                const int32_t key = int32_t(first + j);
                value[count] = s[j];
                column[count] = key;
                count += (s[j] > bar) | ((s[j] == bar) & (key <= last) & (s[j] > -INF));
            }
        }
    }

    // Keeps the k largest: largest first, the lowest column first among equals.
    void sort() {
        if (count <= 2 * CHUNK) rank();
        else {
            for (int64_t i = 0; i < count; ++i) order[i] = {value[i], column[i]};
            std::sort(order.begin(), order.begin() + count, [](const Entry& a, const Entry& b) {
                return a.value > b.value || (a.value == b.value && a.column < b.column);
            });
        }
        count = std::min(count, k);
        for (int64_t i = 0; i < count; ++i) {
            value[i] = order[i].value;
            column[i] = order[i].column;
        }
        if (count < k) return;
        bar = value[k - 1];
        last = column[k - 1];
    }

    static constexpr int64_t CHUNK = 64;
    const int64_t k, room;
    int64_t count = 0;
    float bar = -INF;  // no score below it is wanted, nor one equal to it in a column after the last
    int32_t last = 0;
    std::vector<float> value;
    std::vector<int32_t> column;

private:
    struct Entry {
        float value;
        int32_t column;
    };

    // Few are put in order by comparing all with all: without branches, which scores make hard to predict.
    void rank() {
        for (int64_t i = 0; i < count; ++i) {
            const float x = value[i];
            const int32_t key = column[i];
            int32_t before = 0;
            for (int64_t j = 0; j < count; ++j)
                before += (value[j] > x) | ((value[j] == x) & (column[j] < key));
            order[before] = {x, key};
        }
    }

    std::vector<Entry> order;
};

// A number that at least k of the n maxima reach, or -inf when there are fewer of them: their k-th largest.
inline float reached(const float* maxima, int64_t n, int64_t k) {
    if (n < k) return -INF;
    float bar = INF;
    for (int64_t i = 0; i < n; ++i) {
        int32_t above = 0;
        for (int64_t j = 0; j < n; ++j) above += maxima[j] > maxima[i];
        bar = above < k && maxima[i] < bar ? maxima[i] : bar;
    }
    return bar;
}

// The k largest scores of a row. If k classes have a score that reaches a bar, so do the k largest scores, and they
// lie in classes whose maximum does: few classes are searched.
inline void row_largest(const Row& row, Vec classes[CLASSES], Candidates& best) {
    int64_t vectors = CLASSES;  // as many classes as it takes for the search of k of them to cost no more
    while (vectors > 1 && vectors * vectors * LANES * LANES > 2 * best.k * row.n) {
        vectors /= 2;
        for (int c = 0; c < vectors; ++c) classes[c] = maximum(classes[c], classes[c + vectors]);
    }
    float maxima[CLASSES * LANES], folded[CLASSES * LANES];
    for (int c = 0; c < vectors; ++c) store(maxima + c * LANES, classes[c]);
    int64_t groups = vectors;
    while (groups > 1 && groups / 2 * LANES >= 2 * best.k) {
        groups /= 2;
        for (int c = 0; c < groups; ++c) classes[c] = maximum(classes[c], classes[c + groups]);
    }
    for (int c = 0; c < groups; ++c) store(folded + c * LANES, classes[c]);
    best.clear(reached(folded, groups * LANES, best.k));

    const int64_t n_classes = vectors * LANES;
    int32_t chosen[CLASSES * LANES], n_chosen = 0;
    for (int32_t c = 0; c < n_classes; ++c) {
        chosen[n_chosen] = c;
        n_chosen += maxima[c] >= best.bar;
    }
    for (int32_t c = 0; c < n_chosen; ++c)
        best.take(row.s + chosen[c], row.n - chosen[c], n_classes, row.first + chosen[c]);
    best.sort();
}

// Replaces scores by e^(s - top) and sums what is wanted of them.
template <bool SPREAD, bool DISTANCE>
inline void exponentials(const Row& row, Softmax& softmax) {
    const Vec places = iota();
    softmax.own = softmax.spread = softmax.distance = 0.0f;
    for (int64_t start = 0; start < row.n; start += RUN) {
        const int64_t stop = std::min(start + RUN, row.n);
        Vec own{}, spread{}, distance{};
        for (int64_t j = start; j < stop; j += LANES) {
            Vec shifted = at_least_lowest(load(row.s + j) - softmax.top);
            Vec weight = exponential(shifted);
            store(row.s + j, weight);
            own += weight;
            if (SPREAD) spread += weight * shifted;
            if (DISTANCE) {
                Vec lag = float(row.position - row.first - j) - places;
                distance += weight * (lag < 0.0f ? -lag : lag);
            }
        }
        softmax.own += sum(own);
        if (SPREAD) softmax.spread += sum(spread);
        if (DISTANCE) softmax.distance += sum(distance);
    }
}

// Softmax of a row that sees a key. The shift is the row's own maximum, also where a sink's logit is far above it.
inline Softmax row_softmax(const Call& call, const Row& row, float top, const float* sink) {
    Softmax softmax{};
    softmax.top = top;
    if (call.entropy && call.mean_distance) exponentials<true, true>(row, softmax);
    else if (call.entropy) exponentials<true, false>(row, softmax);
    else if (call.mean_distance) exponentials<false, true>(row, softmax);
    else exponentials<false, false>(row, softmax);
    softmax.log_total = std::log(softmax.own);
    softmax.share = 1.0f / softmax.own;
    if (sink) {
        const float above = *sink - top;
        softmax.log_total = above > 0.0f ? above + std::log1p(softmax.own * std::exp(-above))
                                         : std::log(softmax.own + std::exp(above));
        softmax.share = 1.0f / (softmax.own + std::exp(above));
    }
    softmax.lse = top + softmax.log_total;
    return softmax;
}

// Sum of weights over key columns [low, high).
inline float mass(const Row& row, int64_t low, int64_t high) {
    low = std::max(low, row.low);
    high = std::min(high, row.high);
    return low < high ? sum(row.at(low), high - low) : 0.0f;
}

// What depends on the weights linearly: valid for gradient-weighted ones too. `at` is the row's place in the
// results, `batch` and `query` where it comes from.
inline void write_masses(const Call& call, const Row& row, float share, int64_t at, int64_t batch,
                         int64_t query, const int64_t* feature_ends) {
    if (call.local_mass)
        call.local_mass[at] = share * mass(row, row.position - call.local_window + 1,
                                           row.position + call.local_window);
    if (call.lag_mass)
        for (int64_t b = 0; b < call.n_bins; ++b)
            call.lag_mass[at * call.n_bins + b] =
                share * mass(row, row.position - call.edges[b + 1] + 1,
                             row.position - call.edges[b] + 1);
    if (call.target_mass) {
        const int64_t target = call.targets[batch * call.targets_batch + query];
        const bool seen = target >= row.low && target < row.high;
        call.target_mass[at] = seen ? share * *row.at(target) : 0.0f;
    }
    if (call.feature)
        for (int64_t f = 0; f < call.n_features; ++f) {
            const float* x = call.features + batch * call.features_batch + f * call.keys;
            const int64_t* ends = feature_ends + 2 * f;
            const int64_t low = std::max(row.low, ends[0]), high = std::min(row.high, ends[1]);
            call.feature[at * call.n_features + f] =
                low < high ? share * dot(row.at(low), x + low, high - low) : 0.0f;
        }
}

// What the softmax itself gives, and the largest weights, whose scores were found before it.
inline void write_shape(const Call& call, const Softmax& softmax, int64_t at, const Candidates& best) {
    if (call.lse) call.lse[at] = softmax.lse;
    if (call.entropy)
        call.entropy[at] =
            (softmax.log_total * softmax.own - softmax.spread) * softmax.share;
    if (call.mean_distance) call.mean_distance[at] = softmax.distance / softmax.own;
    if (call.max) call.max[at] = softmax.share;  // the largest weight is e^0
    if (call.argmax) call.argmax[at] = best.count && softmax.share > 0 ? best.column[0] : -1;
    for (int64_t i = 0; i < (call.topk || call.topk_index ? call.k_largest : 0); ++i) {
        const float shifted = i < best.count ? best.value[i] - softmax.top : LOWEST_EXPONENT;
        const float weight = shifted > LOWEST_EXPONENT ? std::exp(shifted) * softmax.share : 0.0f;
        if (call.topk) call.topk[at * call.k_largest + i] = weight;
        if (call.topk_index)
            call.topk_index[at * call.k_largest + i] = weight > 0 ? best.column[i] : -1;
    }
}

// A row without keys: statistics.py says what each statistic is.
inline void write_blind(const Call& call, const float* sink, int64_t at, Candidates& best) {
    Softmax none{};
    none.lse = sink ? *sink : -INF;
    none.distance = std::numeric_limits<float>::quiet_NaN();
    none.own = 1.0f;
    best.clear(INF);
    write_shape(call, none, at, best);
}

}  // namespace headlab
