// The main function of every test program: the tests, or the one child case that a test
// started this program for.
#include "tests/support/process_ranks.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cstdlib>

#ifdef __SANITIZE_THREAD__
// An exception that a future hands from one thread to another is counted by libstdc++,
// which is not instrumented: its last owner seems to race with who looked at it. The
// sanitizer finds the function among the symbols that the program exports.
extern "C" [[gnu::visibility("default")]] const char* __tsan_default_suppressions() {
  return "race:std::__exception_ptr::exception_ptr::_M_release\n";
}
#endif

int main(int argc, char** argv) {
  // c10d's process-wide flight recorder is not made for several ranks in one process: it
  // crashes on concurrent records.
  setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/1);
  // What several threads add up has other bits than what one does. So an operator has one
  // thread, here as on ranks that are threads (run_ranks), and on autograd's threads.
  at::set_num_threads(1);
  if (auto exit_code = fsdp::testing::run_selected_child(argc, argv)) return *exit_code;
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
