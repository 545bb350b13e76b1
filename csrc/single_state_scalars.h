// What every element of one step of Lion, Adagrad or SGD shares.
#pragma once

namespace offload {

struct LionScalars {
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float step_size;    // -lr
  float param_scale;  // 1 - lr * weight decay
};

struct AdagradScalars {
  float eps;
  float step_size;   // -lr / (1 + (step - 1) * lr_decay)
  float grad_decay;  // weight decay as part of the gradient; 0 for none
};

struct SgdScalars {
  float momentum;
  float grad_share;  // 1 - dampening
  float step_size;   // -lr
  float grad_decay;
  bool starts_momentum;  // the momentum is the gradient, whatever its buffer holds
  bool nesterov;
};

}  // namespace offload
