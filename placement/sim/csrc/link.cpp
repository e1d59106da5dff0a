// One thread, which never takes Python's lock: the one who waits for it may hold that.
#include "link.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <limits>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace sim {
namespace {

struct Job {
  void* target;
  const void* source;
  size_t nbytes;
  std::shared_ptr<Time> mark;
};

class Link {
 public:
  explicit Link(Ticket first = 0) : sent_(first), arrived_(first) {}

  Ticket send(Job job) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!std::exchange(started_, true)) {
      std::thread([this] { run(); }).detach();
    }
    waiting_.push_back(std::move(job));
    if (std::exchange(idle_, false)) {
      work_.notify_one();
    }
    const auto ticket = sent_.load(std::memory_order_relaxed) + 1;
    sent_.store(ticket, std::memory_order_relaxed);
    return ticket;
  }

  Ticket last_sent() const {
    return sent_;
  }

  bool has_arrived(Ticket ticket) const {
    return arrived_ >= ticket;
  }

  void wait_for(Ticket ticket) {
    if (has_arrived(ticket)) {
      return;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wanted_ = std::min<Ticket>(wanted_, ticket); // before asking again, so that no wake is lost
      if (has_arrived(ticket)) {
        return;
      }
      arrival_.wait(lock);
    }
  }

 private:
  static constexpr Ticket kNone = std::numeric_limits<Ticket>::max();

  void run() {
    std::vector<Job> jobs;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      idle_ = waiting_.empty();
      work_.wait(lock, [this] { return !waiting_.empty(); });
      std::swap(jobs, waiting_);
      lock.unlock();
      for (auto& job : jobs) {
        if (job.mark) {
          *job.mark = std::chrono::steady_clock::now();
        } else {
          copy_bytes(job.target, job.source, job.nbytes);
        }
        if (++arrived_ >= wanted_) {
          std::lock_guard<std::mutex> between(mutex_);
          wanted_ = kNone;
          arrival_.notify_all();
        }
      }
      jobs.clear();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable arrival_;
  std::vector<Job> waiting_;
  bool started_ = false;
  bool idle_ = false;
  std::atomic<Ticket> sent_;
  std::atomic<Ticket> arrived_;
  std::atomic<Ticket> wanted_{kNone}; // the first that somebody waits for
};

// Leaked: the thread uses it until the process has gone.
Link* g_link = nullptr;

Link& link() {
  static std::once_flag once;
  std::call_once(once, [] {
    g_link = new Link();
    // A fork copies no thread. The child begins with a link on which everything has arrived.
    pthread_atfork(nullptr, nullptr, [] { g_link = new Link(g_link->last_sent()); });
  });
  return *g_link;
}

} // namespace

Ticket send(void* target, const void* source, size_t nbytes) {
  return link().send({target, source, nbytes, nullptr});
}

Ticket send_mark(std::shared_ptr<Time> mark) {
  return link().send({nullptr, nullptr, 0, std::move(mark)});
}

bool has_arrived(Ticket ticket) {
  return ticket == 0 || link().has_arrived(ticket);
}

void wait_for(Ticket ticket) {
  if (ticket != 0) {
    link().wait_for(ticket);
  }
}

Ticket last_sent() {
  return link().last_sent();
}

// The C library copies many megabytes past the caches, faster a byte than it copies the same bytes
// in pieces.
void copy_bytes(void* target, const void* source, size_t nbytes) {
  constexpr size_t kPacket = 64 * 1024;
  for (size_t done = 0; done < nbytes; done += kPacket) {
    std::memmove(
        static_cast<char*>(target) + done,
        static_cast<const char*>(source) + done,
        std::min(kPacket, nbytes - done));
  }
}

} // namespace sim
