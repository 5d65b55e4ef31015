// Ranks that are gone, or do something else, while this one replays.
//
// NCCL's watchdog looks at collectives that ran eagerly, each with its group's timeout, and ends a process in which one
// takes longer: it would wait for ever. Of a replay nobody tells it. So two threads of ours, per GPU, do the same: one
// waits now and then for what a stream was given, the other ends the process where that takes too long; the first may
// itself be stuck, since a full stream blocks. They never hold the GIL, and run no Python: to a recording the program
// has no more threads than without them.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_set>

namespace cgt {

class Watchdog {
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;
  static constexpr double OFTEN = 10, SELDOM = 30;  // looks in a timeout, and at least one in so many seconds
  static constexpr double NEVER = 1e9;              // seconds that a clock can still count

  typedef void (*wait_fn)(int device, void* stream);
  const int device;
  const wait_fn wait;
  // The replays' side: written under the GIL.
  std::atomic<int64_t> launches{0};
  std::atomic<void*> stream{nullptr};

  std::mutex lock;
  std::condition_variable changed;
  int threads = 0;
  bool ended = false;
  double timeout = 0;
  std::string text;
  std::unordered_set<void*> lasting;
  Clock::time_point deadline = Clock::time_point::max();

  // One that waits for another rank among so many. A host may be hundreds of replays ahead of its GPU, and each may be
  // long: as long as the slowest so far, on average between two looks. Until something is known, each may take the
  // timeout.
  static double allowance(double timeout, int64_t replays, double slowest) {
    return std::min(timeout + static_cast<double>(replays) * (slowest < 0 ? timeout : slowest), NEVER);
  }

  void look() {
    int64_t done = 0;
    double slowest = -1;
    auto since = Clock::now();
    std::unique_lock<std::mutex> hold(lock);
    while (!changed.wait_for(hold, Seconds(std::min(timeout / OFTEN, SELDOM)), [this] { return ended; })) {
      const int64_t now = launches;
      void* const last = stream;
      if (now == done || !lasting.count(last)) {
        done = now;
        since = Clock::now();
        continue;
      }
      Seconds more(allowance(timeout, now - done, slowest));
      deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(more);
      changed.notify_all();
      hold.unlock();
      wait(device, last);
      hold.lock();
      deadline = Clock::time_point::max();
      slowest = std::max(slowest, Seconds(Clock::now() - since).count() / static_cast<double>(now - done));
      done = now;
      since = Clock::now();
    }
  }

  void guard() {
    std::unique_lock<std::mutex> hold(lock);
    while (!ended) {
      if (deadline == Clock::time_point::max())
        changed.wait(hold);
      else if (Clock::now() < deadline)
        changed.wait_until(hold, deadline);
      else
        give_up();
    }
  }

  // As NCCL's does: the GPU waits for somebody who will not come.
  [[noreturn]] void give_up() {
    for (size_t at = 0; at < text.size();) {
      const ssize_t n = write(STDERR_FILENO, text.data() + at, text.size() - at);
      if (n <= 0) break;
      at += static_cast<size_t>(n);
    }
    abort();
  }

 public:
  // Never deleted: its threads may outlive all else.
  Watchdog(int device, wait_fn wait) : device(device), wait(wait) {}

  // Replays on this stream, which lasts as long as the process, are to end within so many seconds; or else `text` is
  // told.
  void begin(void* on, double seconds, std::string told) {
    std::lock_guard<std::mutex> hold(lock);
    lasting.insert(on);
    timeout = seconds;
    text = std::move(told);
    if (threads < 1) std::thread([this] { look(); }).detach(), threads = 1;
    if (threads < 2) std::thread([this] { guard(); }).detach(), threads = 2;
    changed.notify_all();
  }

  void note(void* on) noexcept {
    stream.store(on, std::memory_order_relaxed);
    launches.fetch_add(1, std::memory_order_release);
  }

  void end() noexcept {
    std::lock_guard<std::mutex> hold(lock);
    ended = true;
    changed.notify_all();
  }
};

}  // namespace cgt
