// Several documents in one window of tokens ("packed sequences"), each as if it were
// alone: positions start again with it, and no token attends to another document.
#pragma once

#include <ATen/core/Tensor.h>

namespace programs {

struct Documents {
  at::Tensor positions;  // int64 [batch, tokens]: from 0 in each document
  // bool [batch, 1, tokens, tokens]: whether the row's token attends to the column's. One
  // for all blocks; its bytes are batch * tokens^2.
  at::Tensor mask;
};

// begins: bool [batch, tokens], true where a document begins. A window's first token
// always begins one, since what lies before it is not there. On the device of `begins`.
// Local.
Documents documents_of(const at::Tensor& begins);

}  // namespace programs
