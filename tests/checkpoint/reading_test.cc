// The parts that read: JSON, pickles, what a file is, which files of a folder count.
#include "checkpoint/checkpoint.h"
#include "checkpoint/files/file_format.h"
#include "checkpoint/format/box.h"
#include "checkpoint/format/dtype.h"
#include "checkpoint/format/pickle.h"
#include "checkpoint/format/strict_json.h"
#include "checkpoint/format/weight_files.h"
#include "checkpoint/state_dict.h"
#include "tests/checkpoint/seconds_of.h"
#include "tests/support/errors.h"
#include "tests/support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <random>

namespace fsdp::testing {
namespace {

using internal::checkpoint::FileFormat;
using internal::checkpoint::find_overlap;
using internal::checkpoint::format_of;
using internal::checkpoint::intersect;
using internal::checkpoint::numel_of;
using internal::checkpoint::parse_json;
using internal::checkpoint::Pickle;
using internal::checkpoint::Pickled;
using internal::checkpoint::weight_files;
using internal::checkpoint::widens_exactly;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

std::string error_of(const absl::Status& status) { return std::string(status.message()); }

TEST(StrictJson, ARepeatedKeyIsRefusedAtAnyDepth) {
  EXPECT_THAT(error_of(parse_json(R"({"a": {"b": 1, "c": 2, "b": 3}})", "text").status()),
              HasSubstr("text: key 'b' stands there twice"));
  EXPECT_TRUE(parse_json(R"({"a": {"b": 1}, "b": [{"a": 1}, {"a": 2}]})", "text").ok());
  EXPECT_THAT(error_of(parse_json(R"({"a": )", "text").status()), HasSubstr("text: not JSON"));
}

TEST(StrictJson, NestingWithoutEndIsRefused) {
  EXPECT_THAT(error_of(parse_json(std::string(1'000'000, '['), "text").status()),
              HasSubstr("nested too deep"));
}

// Eight times the objects take eight times as long; it was 64.
TEST(StrictJson, TimeGrowsWithTheNumberOfObjectsNotItsSquare) {
  const auto text_of = [](int count) {
    std::string text = "{";
    for (int i = 0; i < count; ++i) {
      text += (i ? ", \"" : "\"") + std::to_string(i) + R"(": {"shape": [1], "dtype": "F32"})";
    }
    return text + "}";
  };
  const std::string few = text_of(4000), many = text_of(32000);
  const auto parse = [](const std::string& text) { EXPECT_TRUE(parse_json(text, "text").ok()); };
  double least_few = 1e9, least_many = 1e9;
  for (int round = 0; round < 3; ++round) {
    least_few = std::min(least_few, seconds_of([&] { parse(few); }));
    least_many = std::min(least_many, seconds_of([&] { parse(many); }));
  }
  EXPECT_LT(least_many, 24 * least_few);
}

const Pickled& only_item(const Pickle& pickle) { return *pickle.root()->items.at(0); }

TEST(Pickles, IntegersOfAnySizeAreValues) {
  // [2 ** 63], [-(2 ** 32)] and, as Python 2 wrote it, [12345678901234567890, True].
  const auto huge = Pickle::parse(std::string("\x80\x02]\x8a\x09\0\0\0\0\0\0\0\x80\0a.", 16), "p");
  ASSERT_TRUE(huge.ok()) << huge.status();
  EXPECT_EQ(only_item(*huge).kind, Pickled::Kind::kLong);
  const auto negative = Pickle::parse(std::string("]\x8a\x05\0\0\0\0\xff"
                                                  "a.",
                                                  10),
                                      "p");
  ASSERT_TRUE(negative.ok()) << negative.status();
  EXPECT_EQ(only_item(*negative).integer, -(int64_t{1} << 32));
  const auto digits = Pickle::parse("(lp0\nL12345678901234567890L\naI01\na.", "p");
  ASSERT_TRUE(digits.ok()) << digits.status();
  EXPECT_EQ(digits->root()->items.at(0)->text, "12345678901234567890");
  EXPECT_EQ(digits->root()->items.at(1)->kind, Pickled::Kind::kBool);
}

TEST(Pickles, OneThatIsCutOffSaysSoAndBytesBehindItAreLeft) {
  const auto whole = Pickle::parse("]q\1.rest", "p");
  ASSERT_TRUE(whole.ok());
  EXPECT_EQ(whole->bytes(), 4);
  EXPECT_TRUE(absl::IsOutOfRange(Pickle::parse("]q", "p").status()));
  EXPECT_TRUE(absl::IsDataLoss(Pickle::parse("]\xff.", "p").status()));
}

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

// A conversion that is said to lose nothing loses nothing: all values of the small
// dtypes.
TEST(Dtypes, WhatWidensExactlyComesBackAsItWas) {
  const auto dtypes = {torch::kDouble,          torch::kFloat,           torch::kHalf,
                       torch::kBFloat16,        torch::kFloat8_e4m3fn,   torch::kFloat8_e5m2,
                       torch::kFloat8_e4m3fnuz, torch::kFloat8_e5m2fnuz, torch::kFloat8_e8m0fnu};
  const auto all = torch::arange(256).to(torch::kByte);
  int exact = 0;
  for (const auto from : dtypes) {
    if (c10::elementSize(from) != 1) continue;
    const auto values = all.view(from);
    for (const auto to : dtypes) {
      if (!widens_exactly(from, to) || from == to) continue;
      ++exact;
      const auto wide = values.to(to).to(torch::kDouble), want = values.to(torch::kDouble);
      EXPECT_TRUE(torch::equal(wide.nan_to_num(77), want.nan_to_num(77))) << from << " " << to;
    }
  }
  EXPECT_EQ(exact, 5 * 4 - 1);
  EXPECT_FALSE(widens_exactly(torch::kFloat8_e8m0fnu, torch::kHalf));
  EXPECT_FALSE(widens_exactly(torch::kFloat4_e2m1fn_x2, torch::kFloat));
  EXPECT_TRUE(widens_exactly(torch::kComplexFloat, torch::kComplexDouble));
}

// Compared with all pairs.
TEST(Boxes, AnOverlapIsFoundWhereThereIsOne) {
  std::mt19937 random(2);
  int overlapping = 0;
  for (int round = 0; round < 3000; ++round) {
    std::vector<internal::checkpoint::Box> boxes(2 + random() % 4);
    for (auto& box : boxes) {
      for (int dim = 0; dim < 2; ++dim) {
        box.push_back({int64_t(random() % 6), int64_t(random() % 4)});
      }
    }
    bool expected = false;
    for (size_t a = 0; a < boxes.size(); ++a) {
      for (size_t b = 0; b < a; ++b) expected |= numel_of(intersect(boxes[a], boxes[b])) > 0;
    }
    const auto found = find_overlap(boxes);
    EXPECT_EQ(found.has_value(), expected);
    if (found) {
      EXPECT_GT(numel_of(intersect(boxes[found->first], boxes[found->second])), 0);
    }
    overlapping += expected;
  }
  EXPECT_GT(overlapping, 300);  // both answers are asked for
  EXPECT_LT(overlapping, 2700);
  EXPECT_TRUE(find_overlap({{}, {}}).has_value());  // two of a tensor without dimensions
}

struct TwoTables : torch::nn::Module {
  explicit TwoTables(int64_t words) {
    register_module("embed", torch::nn::Embedding(words, 3));
    register_module("head", torch::nn::Linear(3, words));
    register_parameter("gain", torch::ones({2}));
  }
};

TEST(Misfits, AnotherVocabularySizeIsToldWithAllThatDoesNotFit) {
  TemporaryFolder folder;
  TwoTables saved(10), wanted(12);
  save({.model = saved}, folder / "saved");
  const auto all = AllOf(HasSubstr("'embed.weight' has shape [12, 3] here and [10, 3]"),
                         HasSubstr("'head.weight' has shape [12, 3]"),
                         HasSubstr("'head.bias' has shape [12]"), Not(HasSubstr("gain")));
  EXPECT_THAT(message_of<c10::ValueError>([&] { load({.model = wanted}, folder / "saved"); }), all);
  EXPECT_THAT(message_of<c10::ValueError>(
                  [&] { load({.model = wanted}, folder / "saved/model/model.safetensors"); }),
              all);
  const auto dict = get_model_state_dict(saved);
  EXPECT_THAT(message_of<c10::ValueError>([&] { set_model_state_dict(wanted, dict); }), all);
}

TEST(Misfits, NamesThatAreMissingStandAloneWhereNothingIsUnexpected) {
  TemporaryFolder folder;
  auto a = torch::ones({1}), b = torch::ones({1});
  save({.tensors = {{"a", a}}}, folder / "saved");
  const auto text = message_of([&] { load({.tensors = {{"a", a}, {"b", b}}}, folder / "saved"); });
  EXPECT_THAT(text, AllOf(HasSubstr("missing in the file: b; "), Not(HasSubstr("only"))));
}

TEST(ManyTensors, SavingVerifyingAndLoadingThemIsLinear) {
  const auto seconds = [](int count) {
    TemporaryFolder folder(memory_folder());
    std::map<std::string, at::Tensor> tensors;
    for (int i = 0; i < count; ++i) tensors["layer." + std::to_string(i)] = torch::ones({2});
    save({.tensors = tensors}, folder / "saved");
    return seconds_of([&] {
      verify_checkpoint(folder / "saved");
      load({.tensors = tensors}, folder / "saved");
    });
  };
  const double few = std::min(seconds(2000), seconds(2000));
  EXPECT_LT(seconds(16000), 24 * few);  // eight times the tensors; it was 64 times
}

}  // namespace
}  // namespace fsdp::testing
