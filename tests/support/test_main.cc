// The main function of every test program: the tests, or the one child case that a test started this program for.
#include <gtest/gtest.h>

#include "tests/support/process_ranks.h"

int main(int argc, char** argv) {
  if (auto exit_code = fsdp::testing::run_selected_child(argc, argv)) return *exit_code;
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
