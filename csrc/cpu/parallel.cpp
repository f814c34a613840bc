#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>
#include <vector>

#if !defined(PACKEDCONV_STD_THREADS)
#include <dlfcn.h>
#include <link.h>

#include <string>
#endif

namespace packedconv {
namespace {

struct Call {
  void (*body)(void*, int);
  void* context;
  std::atomic<int> started;
};

// The thread's number is that of its arrival, which needs no other function of the library.
void enter(void* data) {
  Call& call = *static_cast<Call*>(data);
  call.body(call.context, call.started.fetch_add(1, std::memory_order_relaxed));
}

void run_std_threads(Call* call, int threads) {
  std::vector<std::thread> others;
  try {
    others.reserve(static_cast<std::size_t>(threads) - 1);
    for (int i = 1; i < threads; ++i) others.emplace_back(enter, call);
  } catch (const std::exception&) {
    // Those that there are finish the work.
  }
  enter(call);
  for (std::thread& other : others) other.join();
}

#if !defined(PACKEDCONV_STD_THREADS)

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

struct Library {
  GompParallel gomp_parallel = nullptr;
  std::string name;
};

// Opens a loaded library again, which must be done outside dl_iterate_phdr.
int remember_openmp(dl_phdr_info* info, std::size_t, void* data) {
  const std::string path = info->dlpi_name;
  const std::string name = path.substr(path.rfind('/') + 1);
  for (const char* known : {"libgomp", "libomp", "libiomp5"})
    if (name.compare(0, std::string(known).size(), known) == 0)
      static_cast<std::vector<std::string>*>(data)->push_back(path);
  return 0;
}

Library find_library() {
  std::vector<std::string> paths;
  dl_iterate_phdr(remember_openmp, &paths);
  // PyTorch's before one that another package has brought.
  std::stable_partition(paths.begin(), paths.end(), [](const std::string& path) {
    return path.find("/torch/") != std::string::npos;
  });
  const std::size_t loaded = paths.size();
  // Where none is loaded yet, the system's.
  paths.push_back("libgomp.so.1");
  for (std::size_t i = 0; i < paths.size(); ++i) {
    const std::string& path = paths[i];
    const int flags = RTLD_NOW | RTLD_LOCAL | (i < loaded ? RTLD_NOLOAD : 0);
    void* const handle = dlopen(path.c_str(), flags);
    if (handle == nullptr) continue;
    if (void* const found = dlsym(handle, "GOMP_parallel")) {
      Library library;
      library.gomp_parallel = reinterpret_cast<GompParallel>(found);
      library.name = path;
      return library;
    }
    dlclose(handle);
  }
  return {};
}

const Library& library() {
  // At the first call, when PyTorch has loaded its own.
  static const Library found = find_library();
  return found;
}

#endif

}  // namespace

void parallel(int threads, void (*body)(void* context, int index), void* context) {
  if (threads <= 1) {
    body(context, 0);
    return;
  }
  Call call{body, context, {0}};
#if defined(PACKEDCONV_STD_THREADS)
  run_std_threads(&call, threads);
#else
  if (library().gomp_parallel != nullptr)
    library().gomp_parallel(enter, &call, static_cast<unsigned>(threads), 0);
  else
    run_std_threads(&call, threads);
#endif
}

const char* parallel_library() {
#if defined(PACKEDCONV_STD_THREADS)
  return "std::thread";
#else
  return library().gomp_parallel != nullptr ? library().name.c_str() : "std::thread";
#endif
}

}  // namespace packedconv
