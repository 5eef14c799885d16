// What communicating needs of the process as a whole.
#pragma once

namespace fsdp::internal {

// Local; of use once. Where SIGPIPE has its default action, gives it one that ends the
// process only where the reader of its standard output or error is gone: a peer that is
// gone is then an error of the write, with a text, and no silent death, and `program |
// head` ends as ever. (Programs that this one starts have the default again.) And heeds
// TORCH_CPP_LOG_LEVEL, which LibTorch reads only when asked to.
void prepare_process();

}  // namespace fsdp::internal
