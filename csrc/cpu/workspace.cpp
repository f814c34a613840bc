#include "workspace.h"

#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

namespace packedconv {
namespace {

constexpr std::size_t kAlignment = 4096;

struct Block {
  char* data;
  std::size_t bytes;
};

// Blocks that no call uses: at most as many as calls have run at once.
struct Pool {
  std::mutex mutex;
  std::vector<Block> free;
};

Pool& pool() {
  // Never destroyed, since a thread may still compute when the process ends.
  static Pool* const instance = new Pool;
  return *instance;
}

}  // namespace

Workspace::Workspace(std::size_t bytes) : data_(nullptr), bytes_(0) {
  Block block{nullptr, 0};
  {
    const std::lock_guard<std::mutex> lock(pool().mutex);
    if (!pool().free.empty()) {
      block = pool().free.back();
      pool().free.pop_back();
    }
    // So that giving it back cannot fail.
    pool().free.reserve(pool().free.size() + 16);
  }
#if defined(__SANITIZE_ADDRESS__)
  // Of its exact size, so that the sanitizer sees what lies outside.
  const bool fits = block.bytes == bytes;
#else
  const bool fits = block.bytes >= bytes;
#endif
  if (!fits) {
    std::free(block.data);
    void* memory = nullptr;
    if (posix_memalign(&memory, kAlignment, bytes) != 0) throw std::bad_alloc();
    block = {static_cast<char*>(memory), bytes};
  }
  data_ = block.data;
  bytes_ = block.bytes;
}

Workspace::~Workspace() {
  const std::lock_guard<std::mutex> lock(pool().mutex);
  pool().free.push_back({data_, bytes_});
}

}  // namespace packedconv
