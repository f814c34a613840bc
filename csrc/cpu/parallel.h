// Work shared by the threads of the OpenMP library that the process already has.
//
// A library of its own would keep threads that spin beside PyTorch's after every call, so
// none is linked: GOMP_parallel is looked for among what is loaded (ELF, so Linux). As with
// PyTorch, a process forked after a call on several threads must use one.
#ifndef PACKEDCONV_CPU_PARALLEL_H
#define PACKEDCONV_CPU_PARALLEL_H

namespace packedconv {

// Calls body(context, index) on up to `threads` threads at once, the calling one among
// them, index from 0 and below `threads`. How many there are, is up to the library: a body
// must finish the work even as the only one. It must not throw.
void parallel(int threads, void (*body)(void* context, int index), void* context);

template <typename Body>
void parallel(int threads, const Body& body) {
  parallel(
      threads,
      [](void* context, int index) { (*static_cast<const Body*>(context))(index); },
      const_cast<Body*>(&body));
}

// Where the threads come from.
const char* parallel_library();

}  // namespace packedconv

#endif
