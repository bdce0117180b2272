// Memory that plans use again: an allocator that takes the place of torch's for the CPU. What a
// thread allocates in the scope of a `Pooled` is kept when it is freed, for the next allocation. The
// C library would return large blocks to the system, and every step would pay for touching fresh
// pages.
//
// Only blocks of MIN_BYTES or more are kept. Smaller ones the C library keeps itself (see
// `keep_freed_heap` in pool.py), and with less waste. What is kept and what is in use together
// never exceed the most that was in use lately.

#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <list>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <unordered_map>

namespace program {
namespace {

constexpr size_t MIN_BYTES = 4 << 20;
constexpr size_t PAGE = 4 << 10;
constexpr size_t HUGE_PAGE = 2 << 20;
constexpr size_t LINE = 64;  // of a cache; torch wants tensors aligned to as much
// From here on blocks are made of huge pages: rounding up to them costs 1/8 at most.
constexpr size_t HUGE_FROM_BYTES = 16 << 20;
// A kept block serves requests down to 7/8 of its size.
constexpr size_t SLACK = 8;
// After each run the bound falls by this share, unless the run needed as much again.
constexpr size_t DECAY = 64;
// If nothing is taken for so long, the system may have the pages of kept blocks if it needs them.
constexpr std::chrono::seconds QUIET{1};

// How many `Pooled` this thread is in.
thread_local int depth = 0;

size_t rounded(size_t n) {
  const size_t unit = n >= HUGE_FROM_BYTES ? HUGE_PAGE : PAGE;
  return (n + unit - 1) / unit * unit;
}

// Fresh pages; null if there are none. Huge ones start at a multiple of their size, without which
// the system can't make them: so more is mapped, and both ends are returned.
void* map_pages(size_t size, bool are_huge) {
  const size_t extra = are_huge ? HUGE_PAGE : 0;
  void* start = mmap(
      nullptr, size + extra, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED || !are_huge) {
    return start == MAP_FAILED ? nullptr : start;
  }
  auto begin = reinterpret_cast<uintptr_t>(start);
  const uintptr_t aligned = (begin + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  if (aligned != begin) {
    munmap(start, aligned - begin);
  }
  if (aligned + size != begin + size + extra) {
    munmap(reinterpret_cast<void*>(aligned + size), begin + extra - aligned);
  }
  madvise(reinterpret_cast<void*>(aligned), size, MADV_HUGEPAGE);
  return reinterpret_cast<void*>(aligned);
}

// A block of `size` bytes that starts on line `color` of its first page, for which a page more is
// mapped. If all blocks started alike, equal places of all tensors that a kernel reads and writes
// would compete for one set of a cache.
void* map_block(size_t size, size_t color) {
  void* start = map_pages(size + PAGE, size >= HUGE_FROM_BYTES);
  return start ? static_cast<char*>(start) + color * LINE % PAGE : nullptr;
}

// Where the pages of a block start.
void* pages_of(void* block) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(block) / PAGE * PAGE);
}

// The blocks, kept and in use. Any thread may free a block, so each function locks.
class Pool {
 public:
  // A block of at least `n` bytes; null if there is no memory.
  void* take(size_t n) {
    const size_t size = rounded(n);
    std::lock_guard<std::mutex> guard(mutex_);
    void* block = take_kept(size);
    if (!block) {
      // make room: with the new block there must not be more than the bound
      drop_until(size < bound() ? bound() - size : 0);
      block = map_block(size, n_mapped_);
      if (!block) {
        drop_until(0);
        block = map_block(size, n_mapped_);
      }
      if (!block) {
        return nullptr;
      }
      sizes_[block] = size;
      ++n_mapped_;
    }
    ++n_taken_;
    in_use_ += sizes_[block];
    most_now_ = std::max(most_now_, in_use_);
    return block;
  }

  // Keep a block that is freed; false if it is not one of this pool's.
  bool give_back(void* block) {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto found = sizes_.find(block);
    if (found == sizes_.end()) {
      return false;
    }
    offered_ = false;
    in_use_ -= found->second;
    kept_bytes_ += found->second;
    order_.push_back(block);
    kept_.emplace(found->second, std::prev(order_.end()));
    drop_until(bound());
    return true;
  }

  // A program has run: the bound becomes the most that it used, or falls by a little if that was
  // less. The run of a program that isn't large counts only if blocks were taken.
  void end_run(bool is_large) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (!is_large && n_taken_ == n_taken_at_end_) {
      return;
    }
    n_taken_at_end_ = n_taken_;
    most_lately_ = std::max(most_lately_ - most_lately_ / DECAY, most_now_);
    most_now_ = in_use_;
    drop_until(bound());
  }

  // Return all that is kept to the system.
  void clear() {
    std::lock_guard<std::mutex> guard(mutex_);
    drop_until(0);
    most_lately_ = most_now_ = in_use_;
  }

  // If no block was taken since the last call, let the system take the pages of kept blocks when it
  // runs short of memory. The blocks stay kept: one whose pages are gone gets new ones when it is
  // touched.
  void offer_if_quiet() {
    std::lock_guard<std::mutex> guard(mutex_);
    if (n_taken_ == n_taken_seen_ && !offered_) {
      for (void* block : order_) {
        madvise(pages_of(block), sizes_[block] + PAGE, MADV_FREE);
      }
      offered_ = true;
    }
    n_taken_seen_ = n_taken_;
  }

  // What `functools.CacheInfo` has: hits, misses, the largest size and the present one, in bytes.
  std::array<uint64_t, 4> counts() {
    std::lock_guard<std::mutex> guard(mutex_);
    return {n_taken_ - n_mapped_, n_mapped_, bound(), kept_bytes_};
  }

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  using Order = std::list<void*>;

  // The most bytes that were in use lately: no more may be kept and in use together.
  size_t bound() const { return std::max(most_lately_, most_now_); }

  // The smallest kept block of at least `size` bytes, unless it is too large; null if there is
  // none.
  void* take_kept(size_t size) {
    auto found = kept_.lower_bound(size);
    if (found == kept_.end() || found->first - size > found->first / SLACK) {
      return nullptr;
    }
    // of blocks of one size the one that was freed last: it may be in a cache still
    found = std::prev(kept_.upper_bound(found->first));
    void* block = *found->second;
    kept_bytes_ -= found->first;
    order_.erase(found->second);
    kept_.erase(found);
    return block;
  }

  // Return kept blocks to the system, the longest unused first, until all blocks together, those in
  // use included, have at most `limit` bytes.
  void drop_until(size_t limit) {
    while (!order_.empty() && in_use_ + kept_bytes_ > limit) {
      void* block = order_.front();
      const size_t size = sizes_[block];
      auto [first, last] = kept_.equal_range(size);
      kept_.erase(std::find_if(first, last, [&](const auto& e) { return *e.second == block; }));
      order_.pop_front();
      sizes_.erase(block);
      kept_bytes_ -= size;
      munmap(pages_of(block), size + PAGE);
    }
  }

  std::mutex mutex_;
  std::unordered_map<void*, size_t> sizes_;      // of all blocks
  Order order_;                                  // kept blocks, longest unused first
  std::multimap<size_t, Order::iterator> kept_;  // the same by size; equal ones as they were freed
  // Bytes in use and kept; the most in use in the run under way, and lately.
  size_t in_use_ = 0, kept_bytes_ = 0, most_now_ = 0, most_lately_ = 0;
  // Blocks taken, and fresh ones among them; those taken when a run ended, and at the last look.
  uint64_t n_taken_ = 0, n_mapped_ = 0, n_taken_at_end_ = 0, n_taken_seen_ = 0;
  bool offered_ = false;
};

// The pool, which is never destroyed: tensors may be freed while the process ends.
Pool& pool() {
  static Pool* the_pool = new Pool();
  return *the_pool;
}

// torch's own allocator, for all else.
c10::Allocator* plain = nullptr;

// Frees a block that `allocate` took from the pool.
void free_pooled(void* block) {
  c10::profiledCPUMemoryReporter().Delete(block);
  pool().give_back(block);
}

// Frees what either allocator gave: for callers of torch that know the pointer alone
// (`raw_deleter`).
void free_any(void* block) {
  if (!pool().give_back(block)) {
    plain->raw_deallocate(block);
  }
}

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    if (depth == 0 || n < MIN_BYTES) {
      return plain->allocate(n);
    }
    void* block = pool().take(n);
    if (!block) {
      return plain->allocate(n);
    }
    c10::profiledCPUMemoryReporter().New(block, n);
    return {block, block, &free_pooled, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_any; }

  void copy_data(void* dest, const void* src, size_t count) const override {
    default_copy_data(dest, src, count);
  }
};

// Have the pool serve torch from now on.
void install_pool() {
  static const bool is_installed [[maybe_unused]] = [] {
    plain = c10::GetCPUAllocator();
    c10::SetCPUAllocator(new Allocator(), /*priority=*/1);
    // a child must not find the mutex locked by a thread that it lacks
    pthread_atfork([] { pool().lock(); }, [] { pool().unlock(); }, [] { pool().unlock(); });
    // the C library may hold what earlier runs freed, which the pool is about to map again
    malloc_trim(0);
    try {
      std::thread([] {
        for (;; pool().offer_if_quiet()) std::this_thread::sleep_for(QUIET);
      }).detach();
    } catch (const std::system_error&) {
      // the process may have no more threads: then nothing is offered
    }
    return true;
  }();
}

// In its scope this thread's large allocations come from the pool. May be nested.
struct Pooled {
  Pooled() { ++depth; }
  Pooled(const Pooled&) = delete;
  ~Pooled() { --depth; }
};

// A run of a program. One within another is a part of that.
struct PooledRun {
  const bool is_large;
  const Pooled pooled{};
  ~PooledRun() {
    if (depth == 1) pool().end_run(is_large);
  }
};

}  // namespace
}  // namespace program
