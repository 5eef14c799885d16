#include "examples/output_file.h"

#include "tests/support/temporary_folder.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>

namespace examples {
namespace {

TEST(OutputFile, IsTriedAndLeftAlone) {
  const fsdp::testing::TemporaryFolder folder;
  check_output_file("--report", "");
  check_output_file("--report", folder / "new");
  EXPECT_FALSE(std::filesystem::exists(folder / "new"));
  std::ofstream(folder / "old") << "text";
  check_output_file("--report", folder / "old");
  std::ifstream old(folder / "old");
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(old), {}), "text");
}

TEST(OutputFile, IsRefusedByItsFlag) {
  const fsdp::testing::TemporaryFolder folder;
  for (const auto& path : {folder / "no/folder", folder.path()}) {
    try {
      check_output_file("--report", path);
      ADD_FAILURE() << "no error for " << path;
    } catch (const c10::ValueError& error) {
      const std::string text = error.what_without_backtrace();
      EXPECT_EQ(text.find("--report: " + path + " cannot be written: "), 0u) << text;
    }
  }
}

}  // namespace
}  // namespace examples
