#include "workspace.h"

#include <algorithm>
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

// Blocks that no call uses, and how many are used.
struct Pool {
  std::mutex mutex;
  std::vector<Block> free;
  std::size_t used = 0;
};

Pool& pool() {
  // Never destroyed, since a thread may still compute when the process ends.
  static Pool* const instance = new Pool;
  return *instance;
}

// A block of its exact size where a sanitizer is to see what lies outside.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kExact = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
constexpr bool kExact = true;
#else
constexpr bool kExact = false;
#endif
#else
constexpr bool kExact = false;
#endif

bool is_fit(const Block& block, std::size_t bytes) {
  return kExact ? block.bytes == bytes : block.bytes >= bytes;
}

}  // namespace

Workspace::Workspace(std::size_t bytes) : data_(nullptr), bytes_(0) {
  Block block{nullptr, 0};
  {
    const std::lock_guard<std::mutex> lock(pool().mutex);
    std::vector<Block>& free = pool().free;
    // So that giving a block back cannot fail.
    free.reserve(free.size() + pool().used + 1);
    auto found = std::find_if(free.begin(), free.end(),
                              [&](const Block& known) { return is_fit(known, bytes); });
    // Else one makes room for a larger one.
    if (found == free.end() && !free.empty()) found = free.end() - 1;
    if (found != free.end()) {
      block = *found;
      free.erase(found);
    }
    ++pool().used;
  }
  if (!is_fit(block, bytes)) {
    std::free(block.data);
    void* memory = nullptr;
    if (posix_memalign(&memory, kAlignment, bytes) != 0) {
      const std::lock_guard<std::mutex> lock(pool().mutex);
      --pool().used;
      throw std::bad_alloc();
    }
    block = {static_cast<char*>(memory), bytes};
  }
  data_ = block.data;
  bytes_ = block.bytes;
}

Workspace::~Workspace() {
  const std::lock_guard<std::mutex> lock(pool().mutex);
  --pool().used;
  pool().free.push_back({data_, bytes_});
}

}  // namespace packedconv
