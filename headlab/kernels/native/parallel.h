// Memory and threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace headlab {

// Floats that begin with a cache line.
struct Buffer {
    explicit Buffer(int64_t n)
        : floats(static_cast<float*>(::operator new(n * sizeof(float) + 64, std::align_val_t(64)))) {}
    ~Buffer() { ::operator delete(floats, std::align_val_t(64)); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    float* floats;
};

// Runs work(item) for every item, on several threads. False when one of them ran out of memory.
template <class Work>
bool parallel(int64_t items, int64_t threads, const Work& work) {
    std::atomic<int64_t> next{0};
    std::atomic<bool> good{true};
    auto loop = [&] {
        try {
            auto state = work.state();
            for (int64_t item; (item = next++) < items;) work(item, *state);
        } catch (const std::bad_alloc&) {
            good = false;
        }
    };
    std::vector<std::thread> helpers;
    try {
        for (int64_t t = 1; t < std::min(threads, items); ++t) helpers.emplace_back(loop);
    } catch (const std::system_error&) {
        // No further thread may start: those there are do the work.
    }
    loop();
    for (auto& helper : helpers) helper.join();
    return good;
}

}  // namespace headlab
