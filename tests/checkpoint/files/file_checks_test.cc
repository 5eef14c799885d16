// What a file is, and what one without weights is called.
#include "checkpoint/files/file_checks.h"

#include "checkpoint/checkpoint.h"
#include "tests/support/errors.h"
#include "tests/support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <string>

namespace fsdp::testing {
namespace {

using internal::checkpoint::FileFormat;
using internal::checkpoint::format_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(FileFormats, AreToldByTheirFirstBytes) {
  EXPECT_EQ(format_of(std::string("PK\3\4", 4)), FileFormat::kTorchZip);
  EXPECT_EQ(format_of(std::string("\x80\x02\x8a\x0al\xfc\x9c\x46\xf9\x20j\xa8P\x19.", 15)),
            FileFormat::kTorchLegacy);
  EXPECT_EQ(format_of(std::string("\x40\0\0\0\0\0\0\0{\"", 10)), FileFormat::kSafetensors);
  EXPECT_EQ(format_of(std::string("{\1\0\0\0\0\0\0{\"", 10)), FileFormat::kSafetensors);
  EXPECT_EQ(format_of("{\"weight_map\": {"), FileFormat::kJson);
  EXPECT_EQ(format_of("<html>"), FileFormat::kOther);
}

TEST(FileFormats, AFileWithoutWeightsIsCalledWhatItIs) {
  TemporaryFolder folder;
  const auto message = [&](const std::string& bytes) {
    std::ofstream(folder / "file.pt", std::ios::binary | std::ios::trunc) << bytes;
    auto w = torch::zeros({1});
    return message_of([&] { load({.tensors = {{"w", w}}}, folder / "file.pt"); });
  };
  EXPECT_THAT(message("version https://git-lfs.example/spec/v1\noid sha256:12\nsize 9\n"),
              AllOf(HasSubstr("file.pt: a Git LFS pointer"), HasSubstr("git lfs pull")));
  EXPECT_THAT(message("\n<!DOCTYPE html><html>"), HasSubstr("file.pt: a web page (HTML)"));
  EXPECT_THAT(message("\x1f\x8b\x08"), HasSubstr("compressed by gzip"));
  EXPECT_THAT(message(""), HasSubstr("an empty file"));
  EXPECT_THAT(message("{\"error\": 3}"), HasSubstr("not an index of weights"));
  EXPECT_THAT(message("\x80\x02]."), HasSubstr("a pickle that torch.save did not write"));
  EXPECT_THAT(message("PK\3\4 and nothing"), HasSubstr("not a file of torch.save"));
  EXPECT_THAT(message("hello, world"),
              HasSubstr("neither a safetensors file nor one of torch.save"));
}

TEST(FileFormats, AnErrorNamesThePathOnce) {
  auto w = torch::zeros({1});
  const auto text = message_of([&] { load({.tensors = {{"w", w}}}, "/nowhere/at/all"); });
  EXPECT_EQ(text.find("/nowhere"), text.rfind("/nowhere")) << text;
}

}  // namespace
}  // namespace fsdp::testing
