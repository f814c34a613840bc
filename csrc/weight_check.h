// Whether a packed weight is what its layer says. A kernel that reads a word trusts it, so this
// is what stands between a weight that was written to and an access out of bounds.
#ifndef PACKEDCONV_WEIGHT_CHECK_H
#define PACKEDCONV_WEIGHT_CHECK_H

#include "layer_shape.h"
#include "packed_view.h"

namespace packedconv {

// Throws std::invalid_argument that names what of the shape no kernel computes, or the first rule
// of FORMAT.md that words or offsets break. Reads nothing past the counts of the view.
void check_weight(const packedconv_layer_shape& shape, const PackedView& weight);

}  // namespace packedconv

#endif
