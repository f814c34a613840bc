#include "cuda.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(PACKEDCONV_EMULATION_THREADS)
#include <condition_variable>
#include <thread>
#else
#include <sys/mman.h>
#include <ucontext.h>

#include <deque>
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__  // as GCC defines it
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#else
inline void __sanitizer_start_switch_fiber(void**, const void*, std::size_t) {}
inline void __sanitizer_finish_switch_fiber(void*, const void**, std::size_t*) {}
#endif
#endif

PACKEDCONV_EACH_THREAD uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim, gridDim;

namespace packedconv {
namespace emulation {
namespace {

struct Copy {
  void* target;
  std::size_t bytes;
  unsigned char value[16];
};

// Where a thread came to a stop.
enum class Stop { barrier, returned, failed };

struct Thread {
  uint3 index;
  Stop stop;
  int line;             // of the barrier
  std::string failure;  // what was thrown
  std::vector<Copy> copies;
  std::vector<std::size_t> groups;  // copies of each committed group, oldest first
  std::size_t uncommitted;
};

// Thrown in threads that wait when their block cannot go on.
struct BlockStopped {};

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

std::size_t shared_per_block = 232448;
bool asynchronous = true;
std::unique_ptr<void, Free> block_memory;
PACKEDCONV_EACH_THREAD Thread* current;

std::string name(const char* what, const uint3& index) {
  return std::string(what) + " (" + std::to_string(index.x) + ", " + std::to_string(index.y) +
         ", " + std::to_string(index.z) + ")";
}

std::string where(const Thread& thread) {
  return name("thread", thread.index) +
         (thread.stop == Stop::barrier ? " waits at line " + std::to_string(thread.line)
                                       : std::string(" returned"));
}

// Why a block that has stopped cannot go on; empty if it can.
std::string find_problem(const std::vector<Thread>& threads) {
  for (const Thread& thread : threads) {
    if (thread.stop == Stop::failed) {
      return name("block", blockIdx) + ", " + name("thread", thread.index) + ": " + thread.failure;
    }
  }
  const Thread& first = threads.front();
  for (const Thread& thread : threads) {
    if (thread.stop != first.stop || thread.line != first.line) {
      return name("block", blockIdx) + ": divergent barrier: " + where(first) + ", " +
             where(thread);
    }
  }
  return std::string();
}

void begin_block(std::size_t index, std::size_t shared_bytes) {
  blockIdx = {static_cast<unsigned>(index % gridDim.x),
              static_cast<unsigned>(index / gridDim.x % gridDim.y),
              static_cast<unsigned>(index / gridDim.x / gridDim.y)};
  void* memory = nullptr;
  if (posix_memalign(&memory, 16, shared_bytes) != 0) throw std::bad_alloc();
  std::memset(memory, 0xff, shared_bytes);
  block_memory.reset(memory);
}

// Runs the kernel as one thread of a block and notes how it ended. False if its block was
// stopped at a barrier.
bool run_thread(Thread& thread, const std::function<void()>& kernel) {
  thread.copies.clear();
  thread.groups.clear();
  thread.uncommitted = 0;
  Stop stop = Stop::returned;
  try {
    kernel();
  } catch (const BlockStopped&) {
    return false;
  } catch (const std::exception& error) {
    stop = Stop::failed;
    thread.failure = error.what();
  }
  thread.stop = stop;
  thread.line = 0;
  return true;
}

std::vector<Thread> make_threads() {
  std::vector<Thread> threads(blockDim.x * blockDim.y * blockDim.z);
  for (unsigned at = 0; at < threads.size(); ++at) {
    threads[at].index = {at % blockDim.x, at / blockDim.x % blockDim.y,
                         at / blockDim.x / blockDim.y};
  }
  return threads;
}

#if defined(PACKEDCONV_EMULATION_THREADS)

// With one barrier used again and again, a thread that leaves it late would synchronise with
// those that have come to it again already, and ThreadSanitizer could miss their races.
// Two used in turn keep them apart: nobody comes to one again before all have left it.
class Barrier {
 public:
  // Waits for all `count` threads; the last one runs `complete`, whose answer all return.
  template <typename Complete>
  bool wait(std::size_t count, const Complete& complete) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (++arrived_ == count) {
      arrived_ = 0;
      answer_ = complete();
      ++uses_;
      all_arrived_.notify_all();
    } else {
      const unsigned use = uses_;
      all_arrived_.wait(lock, [&] { return uses_ != use; });
    }
    return answer_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_arrived_;
  std::size_t arrived_ = 0;
  unsigned uses_ = 0;
  bool answer_ = false;
};

class Block {
 public:
  // Calls task(0) to task(count - 1) at the same time, on threads kept between launches.
  void run(std::size_t count, const std::function<void(std::size_t)>& task) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (workers_.size() < count) workers_.emplace_back(&Block::work, this, workers_.size());
    task_ = &task;
    count_ = running_ = count;
    ++round_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return running_ == 0; });
  }

  template <typename Complete>
  bool wait(const Complete& complete) {
    return barriers_[turn_++ % 2].wait(count_, complete);
  }

  ~Block() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    for (std::thread& worker : workers_) worker.join();
  }

 private:
  void work(std::size_t index) {
    unsigned round = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stopping_ || (round_ != round && index < count_); });
      if (stopping_) return;
      round = round_;
      lock.unlock();
      turn_ = 0;
      (*task_)(index);
      lock.lock();
      if (--running_ == 0) changed_.notify_all();
    }
  }

  static thread_local unsigned turn_;
  Barrier barriers_[2];
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::thread> workers_;
  const std::function<void(std::size_t)>* task_ = nullptr;
  std::size_t count_ = 0, running_ = 0;
  unsigned round_ = 0;
  bool stopping_ = false;
};

thread_local unsigned Block::turn_;
Block block;
std::vector<Thread> threads;
std::string problem;

bool no_problem() {
  problem = find_problem(threads);
  return problem.empty();
}

void stop_at_barrier() {
  if (!block.wait(no_problem)) throw BlockStopped();
}

void run_blocks(const std::function<void()>& kernel, std::size_t blocks,
                std::size_t shared_bytes) {
  threads = make_threads();
  begin_block(0, shared_bytes);
  block.run(threads.size(), [&](std::size_t at) {
    current = &threads[at];
    threadIdx = current->index;
    for (std::size_t index = 0; index < blocks; ++index) {
      if (!run_thread(*current, kernel)) break;
      const bool next = block.wait([&] {
        if (!no_problem()) return false;
        if (index + 1 < blocks) begin_block(index + 1, shared_bytes);
        return true;
      });
      if (!next) break;
    }
  });
  block_memory.reset();
  if (!problem.empty()) throw std::runtime_error(problem);
}

#else

// An execution context with the stack it runs on.
struct Context {
  ucontext_t state;
  void* fake_stack;  // AddressSanitizer's
  const void* stack;
  std::size_t stack_bytes;
};

constexpr std::size_t kStackBytes = 128 * 1024;
Context host;
std::deque<Context> fibers;  // which do not move: a ucontext_t points into itself
const std::function<void()>* kernel_call;
bool stopping;

void switch_context(Context& from, Context& to) {
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.stack_bytes);
  swapcontext(&from.state, &to.state);
  __sanitizer_finish_switch_fiber(from.fake_stack, &to.stack, &to.stack_bytes);
}

Context& fiber_of(const Thread& thread) {
  return fibers[(thread.index.z * blockDim.y + thread.index.y) * blockDim.x + thread.index.x];
}

void fiber_main() {
  __sanitizer_finish_switch_fiber(nullptr, &host.stack, &host.stack_bytes);
  // The same fiber runs the same thread of block after block, launch after launch.
  for (;;) {
    run_thread(*current, *kernel_call);
    switch_context(fiber_of(*current), host);
  }
}

void stop_at_barrier() {
  switch_context(fiber_of(*current), host);
  if (stopping) throw BlockStopped();
}

void make_fibers(std::size_t count) {
  while (fibers.size() < count) {
    void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (stack == MAP_FAILED) throw std::bad_alloc();
    fibers.emplace_back();
    Context& fiber = fibers.back();
    fiber.stack = stack;
    fiber.stack_bytes = kStackBytes;
    getcontext(&fiber.state);
    fiber.state.uc_stack.ss_sp = stack;
    fiber.state.uc_stack.ss_size = kStackBytes;
    fiber.state.uc_link = nullptr;
    makecontext(&fiber.state, fiber_main, 0);
  }
}

// Lets every thread run to its next stop. Whoever relies on an order of threads without a
// barrier is found sooner when the order changes.
void run_to_stop(std::vector<Thread>& threads, bool backwards) {
  for (std::size_t at = 0; at < threads.size(); ++at) {
    current = &threads[backwards ? threads.size() - 1 - at : at];
    threadIdx = current->index;
    if (!stopping || current->stop == Stop::barrier) switch_context(host, fiber_of(*current));
  }
}

void run_blocks(const std::function<void()>& kernel, std::size_t blocks,
                std::size_t shared_bytes) {
  std::vector<Thread> threads = make_threads();
  make_fibers(threads.size());
  kernel_call = &kernel;
  bool backwards = false;
  for (std::size_t index = 0; index < blocks; ++index) {
    begin_block(index, shared_bytes);
    do {
      run_to_stop(threads, backwards);
      backwards = !backwards;
      const std::string problem = find_problem(threads);
      if (!problem.empty()) {
        stopping = true;
        run_to_stop(threads, false);
        stopping = false;
        block_memory.reset();
        throw std::runtime_error(problem);
      }
    } while (threads.front().stop == Stop::barrier);
  }
  block_memory.reset();
}

#endif

}  // namespace

void* shared_memory() { return block_memory.get(); }

void start_copy(void* target, const void* source, std::size_t bytes, bool inside) {
  if (reinterpret_cast<std::uintptr_t>(target) % bytes != 0) {
    throw std::runtime_error("start_copy: target is not a multiple of " + std::to_string(bytes));
  }
  if (reinterpret_cast<std::uintptr_t>(source) % bytes != 0) {
    throw std::runtime_error("start_copy: source is not a multiple of " + std::to_string(bytes));
  }
  Copy copy = {target, bytes, {}};
  if (inside) std::memcpy(copy.value, source, bytes);
  if (!asynchronous) {
    std::memcpy(target, copy.value, bytes);
    return;
  }
  std::memset(target, 0xff, bytes);
  current->copies.push_back(copy);
  ++current->uncommitted;
}

void wait_copies(std::size_t pending) {
  std::vector<std::size_t>& groups = current->groups;
  std::size_t landed = 0;
  while (groups.size() > pending) {
    for (const std::size_t end = landed + groups.front(); landed < end; ++landed) {
      const Copy& copy = current->copies[landed];
      std::memcpy(copy.target, copy.value, copy.bytes);
    }
    groups.erase(groups.begin());
  }
  current->copies.erase(current->copies.begin(), current->copies.begin() + landed);
}

cudaError_t launch(const std::function<void()>& thread, dim3 grid, dim3 block,
                   std::size_t shared_bytes) {
  static std::mutex one_launch;
  const std::lock_guard<std::mutex> lock(one_launch);
  if (shared_bytes > shared_per_block) return cudaErrorInvalidValue;
  const std::uint64_t block_threads = std::uint64_t{block.x} * block.y * block.z;
  const bool fits = block.x <= 1024 && block.y <= 1024 && block.z <= 64 && block_threads >= 1 &&
                    block_threads <= 1024 && grid.x >= 1 && grid.x <= 0x7fffffff && grid.y >= 1 &&
                    grid.y <= 65535 && grid.z >= 1 && grid.z <= 65535;
  if (!fits) return cudaErrorInvalidConfiguration;
  gridDim = grid;
  blockDim = block;
  run_blocks(thread, std::size_t{grid.x} * grid.y * grid.z, shared_bytes);
  return cudaSuccess;
}

void set_shared_per_block(std::size_t bytes) { shared_per_block = bytes; }

void set_asynchronous_copies(bool value) { asynchronous = value; }

bool asynchronous_copies() { return asynchronous; }

}  // namespace emulation

void commit_copies() {
  emulation::Thread& thread = *emulation::current;
  thread.groups.push_back(thread.uncommitted);
  thread.uncommitted = 0;
}

}  // namespace packedconv

void __syncthreads(int line) {
  packedconv::emulation::current->stop = packedconv::emulation::Stop::barrier;
  packedconv::emulation::current->line = line;
  packedconv::emulation::stop_at_barrier();
}

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
  }
  return "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
  }
  return "unrecognized error code";
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : cudaErrorInvalidDevice;
}
