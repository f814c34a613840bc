// Memory for the inside of a call, kept from one call to the next.
#ifndef PACKEDCONV_CPU_WORKSPACE_H
#define PACKEDCONV_CPU_WORKSPACE_H

#include <cstddef>

namespace packedconv {

// A block of memory aligned to pages, taken from those that earlier calls gave back, of any
// plan, or allocated. Throws std::bad_alloc.
class Workspace {
 public:
  explicit Workspace(std::size_t bytes);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  char* data() const { return data_; }

 private:
  char* data_;
  std::size_t bytes_;
};

}  // namespace packedconv

#endif
