#include "programs/trainer/data/mapped_file.h"

#include "tests/support/errors.h"
#include "tests/support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>

namespace programs {
namespace {

using fsdp::testing::TemporaryFolder;

TEST(MappedFile, HasTheBytes) {
  const TemporaryFolder folder;
  std::ofstream(folder / "some") << "bytes";
  const MappedFile some(folder / "some");
  EXPECT_EQ(std::string(some.data(), static_cast<size_t>(some.size())), "bytes");
  std::ofstream(folder / "none");
  EXPECT_EQ(MappedFile(folder / "none").size(), 0);
}

TEST(MappedFile, ThatCannotBeReadIsNamed) {
  const TemporaryFolder folder;
  for (const auto& path : {folder / "absent", folder.path()}) {
    fsdp::testing::expect_error<c10::ValueError>([&] { MappedFile file(path); },
                                                 ::testing::StartsWith(path + ": "));
  }
}

}  // namespace
}  // namespace programs
