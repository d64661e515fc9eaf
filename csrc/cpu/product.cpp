// The products of product.h for one instruction set.
#include "product.h"

#include "product_gradients.h"
#include "product_logits.h"

namespace exgrpo::EXGRPO_VARIANT {

const Product product = {sums,
                         largest,
                         target_logits,
                         entropy_gradient,
                         hidden_gradient,
                         weight_gradient<float>,
                         weight_gradient<uint16_t>};

}  // namespace exgrpo::EXGRPO_VARIANT
