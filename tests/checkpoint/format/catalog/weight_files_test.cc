// Which files of a folder count.
#include "checkpoint/format/catalog/foreign_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

using internal::checkpoint::weight_files;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(WeightFiles, ThePlainFilesAreReadAndVariantsLeftAside) {
  const auto found = weight_files({"model.fp16.safetensors", "model.safetensors", "config.json",
                                   "pytorch_model.bin", ".hidden.safetensors"});
  EXPECT_THAT(found.names, ElementsAre("model.safetensors"));
  ASSERT_EQ(found.variants.size(), 1);
  EXPECT_EQ(found.variants[0].name, "model.fp16.safetensors");
}

TEST(WeightFiles, AnIndexNamesTheFiles) {
  EXPECT_EQ(
      weight_files({"model.safetensors.index.json", "model-00001-of-00002.safetensors"}).index,
      "model.safetensors.index.json");
  EXPECT_EQ(
      weight_files({"pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin"}).index,
      "pytorch_model.bin.index.json");
  EXPECT_EQ(weight_files({"model.safetensors.index.fp16.json", "model.safetensors"}).index, "");
}

TEST(WeightFiles, NumberedFilesAreReadTogether) {
  const auto found =
      weight_files({"model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors",
                    "model.fp16-00001-of-00001.safetensors"});
  EXPECT_THAT(found.names,
              ElementsAre("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"));
  EXPECT_EQ(found.variants.size(), 1);
  EXPECT_THAT(weight_files({"optimizer.bin", "training_args.bin", "notes.txt"}).names, IsEmpty());
}

}  // namespace
}  // namespace fsdp::testing
