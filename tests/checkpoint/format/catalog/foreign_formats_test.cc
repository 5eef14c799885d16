// Files of every dtype, layout and container that Python's torch.save, TorchScript and
// safetensors write: fixtures/write_foreign.py writes them and what must be read, byte by
// byte. Then the way back: what is converted from them, read by Python.
#include "checkpoint/checkpoint.h"
#include "checkpoint/convert.h"
#include "checkpoint/files/file_calls.h"
#include "checkpoint/format/catalog/foreign_files.h"
#include "checkpoint/format/dtype.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/inspect.h"
#include "fully_shard/fully_shard.h"
#include "tests/checkpoint/python.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/warnings.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <random>

namespace fsdp::testing {
namespace {

namespace files = internal::checkpoint;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

using Tensors = std::map<std::string, at::Tensor>;

// Everything that the file holds as tensors, to be filled; their values are not the
// file's.
Tensors tensors_like(const std::string& path) {
  Tensors tensors;
  const files::Catalog catalog = files::catalog_of_files(path).value();
  for (const auto& [name, stored] : catalog.tensors) {
    at::Tensor& tensor = tensors[name] = torch::empty(stored.shape, stored.dtype);
    if (tensor.nbytes() > 0) std::memset(tensor.mutable_data_ptr(), 0x5a, tensor.nbytes());
  }
  return tensors;
}

at::Tensor bytes_of(const at::Tensor& tensor) {
  return torch::from_blob(tensor.mutable_data_ptr(), {static_cast<int64_t>(tensor.nbytes())},
                          torch::kByte);
}

// " [2, 3]", as Python says it.
std::string shape_text(const at::Tensor& tensor) {
  std::string text;
  for (const auto size : tensor.sizes()) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return " [" + text + "]";
}

class ForeignFormats : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (!python_has_torch()) return;
    folder_ = std::make_unique<TemporaryFolder>();
    ASSERT_EQ(run_python("write_foreign.py", folder_->path()), 0);
  }
  static void TearDownTestSuite() { folder_.reset(); }
  void SetUp() override {
    if (!python_has_torch()) GTEST_SKIP() << kNoPython;
  }
  static std::string file(const std::string& name) { return *folder_ / name; }

  // Names, dtypes, shapes and bytes are those that Python reads; strictly where the file
  // holds nothing else.
  static LoadResult expect_reads(const std::string& name, bool strict = true) {
    SCOPED_TRACE(name);
    Tensors read = tensors_like(file(name)), expected = tensors_like(file(name + ".expected"));
    load({.tensors = expected}, file(name + ".expected"));
    const auto header =
        files::read_header(files::InputFile::open(file(name + ".expected")).value()).value();
    EXPECT_EQ(read.size(), expected.size());
    LoadResult result = load({.tensors = read}, file(name), {.strict = strict});
    for (const auto& [key, bytes] : expected) {
      if (read.count(key) == 0) {
        ADD_FAILURE() << key << " was not read";
        continue;
      }
      const std::string said = header.metadata.at(key);
      const auto dtype = files::dtype_of_python_name(said.substr(0, said.find(' ')));
      EXPECT_EQ(read.at(key).scalar_type(), dtype) << key;
      EXPECT_EQ(shape_text(read.at(key)), said.substr(said.find(' '))) << key;
      EXPECT_TRUE(torch::equal(bytes_of(read.at(key)), bytes)) << key;
    }
    return result;
  }

 private:
  static inline std::unique_ptr<TemporaryFolder> folder_;
};

TEST_F(ForeignFormats, EveryDtypeIsRead) { expect_reads("dtypes.pt"); }

TEST_F(ForeignFormats, FilesBefore16AreRead) {
  expect_reads("dtypes_old.pt");
  expect_reads("strides_old.pt");
  expect_reads("protocol4_old.pt");
  expect_reads("held_old.pt");
}

TEST_F(ForeignFormats, TensorsOfAnyStridesAndLazyBitsAreRead) {
  expect_reads("strides.pt");
  expect_reads("protocol5.pt");
}

TEST_F(ForeignFormats, FilesOfAnyStorageAlignmentAreRead) {
  for (const std::string name : {"aligned256.pt", "aligned2048.pt", "aligned32768.pt"}) {
    expect_reads(name);
  }
}

TEST_F(ForeignFormats,
       TensorsAreFoundInListsNamedTuplesDataclassesSubclassesAndBesideHugeIntegers) {
  expect_reads("held.pt");
}

TEST_F(ForeignFormats, WholeModulesAreReadByTheNamesOfTheirStateDict) {
  const auto loaded = expect_reads("module.pt");
  EXPECT_THAT(loaded.skipped, UnorderedElementsAre("reference"));
  expect_reads("module_old.pt");
}

TEST_F(ForeignFormats, TorchScriptIsReadByTheNamesOfItsStateDict) {
  expect_reads("script.pt");
  expect_reads("trace.pt");
}

// torch.jit.freeze makes constants of parameters, which have no names.
TEST_F(ForeignFormats, ConstantsOfFrozenTorchScriptAreNamed) {
  for (const std::string name : {"frozen.pt", "frozen_but_table.pt"}) {
    Warnings warnings;
    auto scale = torch::zeros({2, 3});
    const auto loaded = load({.tensors = {{"scale", scale}}}, file(name), {.strict = false});
    EXPECT_THAT(loaded.missing, UnorderedElementsAre("scale"));
    EXPECT_THAT(loaded.skipped, Contains("CONSTANTS.c0"));
    EXPECT_THAT(loaded.unexpected, Contains("CONSTANTS.c0"));
    EXPECT_THAT(warnings.texts(), Contains(HasSubstr("as torch.jit.freeze makes of a parameter")));
  }
  expect_reads("frozen_but_table.pt", /*strict=*/false);
  auto scale = torch::zeros({2, 3});
  EXPECT_THAT(
      message_of<c10::ValueError>([&] {
        load({.tensors = {{"scale", scale}}}, file("frozen.pt"));
      }),
      AllOf(HasSubstr("missing in the file: scale"), HasSubstr("save the module that was frozen")));
}

TEST_F(ForeignFormats, WhatIsNotReadLeavesTheRestReadableAndIsNamed) {
  for (const std::string name : {"odd.pt", "odd_old.pt"}) {
    Warnings warnings;
    const auto loaded = expect_reads(name, /*strict=*/false);
    for (const std::string left :
         {"sparse", "csr", "quantized", "meta", "storage", "set", "frozenset", "sealed", "made"}) {
      EXPECT_THAT(loaded.skipped, Contains(left));
      EXPECT_THAT(loaded.unexpected, Contains(left));
    }
    EXPECT_THAT(loaded.skipped, Contains("array"));
    EXPECT_THAT(loaded.skipped, Contains("options"));
    EXPECT_THAT(warnings.texts(), Contains(HasSubstr("'sparse' is a sparse tensor")));
    EXPECT_THAT(describe_checkpoint(file(name)),
                AllOf(HasSubstr("not read: options, an object of argparse.Namespace"),
                      HasSubstr("not read: quantized, a quantized tensor"),
                      HasSubstr("not read: set, a set, whose tensors have no names"),
                      HasSubstr("not read: sealed, an object with a state of its own"),
                      HasSubstr("not read: made, an object of __main__.Made, which is made of")));
  }
}

TEST_F(ForeignFormats, WhatIsAskedForAndNotReadIsRefusedByName) {
  const auto sparse = torch::zeros({3, 3});
  EXPECT_THAT(
      message_of<c10::ValueError>([&] {
        load({.tensors = {{"sparse", sparse}}}, file("odd.pt"));
      }),
      AllOf(HasSubstr("missing in the file: sparse"), HasSubstr("'sparse' is a sparse tensor")));
  const auto loaded = load({.tensors = {{"sparse", sparse}}}, file("odd.pt"), {.strict = false});
  EXPECT_THAT(loaded.missing, UnorderedElementsAre("sparse"));
}

TEST_F(ForeignFormats, SafetensorsOfDtypesThatNoTensorHasAreListedAndTheRestIsRead) {
  const auto loaded = expect_reads("odd.safetensors", /*strict=*/false);
  EXPECT_THAT(loaded.skipped, UnorderedElementsAre("packed", "sixes", "new"));
  EXPECT_THAT(describe_checkpoint(file("odd.safetensors")),
              HasSubstr("packed, a tensor of the dtype F4, shape [3,2], 3 bytes"));
  const auto packed = torch::zeros({3, 2});
  EXPECT_THAT(message_of<c10::ValueError>([&] {
                load({.tensors = {{"packed", packed}}}, file("odd.safetensors"));
              }),
              HasSubstr("'packed' is a tensor of the dtype F4"));
}

TEST_F(ForeignFormats, FoldersOfTorchSaveAndVariantsAreReadAsHuggingFaceDoes) {
  expect_reads("bins");
  expect_reads("one_bin");
  expect_reads("variants/model.fp16.safetensors");
  const auto loaded = expect_reads("variants");
  EXPECT_THAT(loaded.skipped, UnorderedElementsAre("model.fp16.safetensors"));
  EXPECT_EQ(tensors_like(file("bins/pytorch_model.bin.index.json")).size(), 4);
}

// Each rank takes its part of tensors that are cut, whatever their strides in the file.
TEST_F(ForeignFormats, RanksTakeTheirPartsOfStridedTensors) {
  Tensors whole = tensors_like(file("strides.pt"));
  load({.tensors = whole}, file("strides.pt"));
  for (const std::string name : {"strides.pt", "strides_old.pt"}) {
    for (const int64_t dim : {0, 1}) {
      on_ranks_of(3, [&](const DeviceMesh& mesh) {
        Tensors read;
        for (const auto& [key, value] : whole) {
          if (value.dim() <= dim) continue;
          read[key] = distribute_tensor(torch::zeros_like(value), mesh, {Shard{dim}});
        }
        load({.tensors = read}, file(name), {.strict = false});
        for (const auto& [key, value] : read) {
          EXPECT_TRUE(torch::equal(full_value(value), whole.at(key))) << name << " " << key;
        }
      });
    }
  }
}

TEST_F(ForeignFormats, TargetsOfOtherStridesAndDtypesAreFilled) {
  Tensors whole = tensors_like(file("strides.pt"));
  load({.tensors = whole}, file("strides.pt"));
  Tensors read;
  for (const auto& [key, value] : whole) {
    const auto dtype = value.is_complex() ? torch::kComplexDouble : torch::kDouble;
    read[key] = value.dim() == 2 ? torch::zeros({value.size(1), value.size(0)}, dtype).t()
                                 : torch::zeros(value.sizes(), dtype);
  }
  read.at("conj") = torch::zeros({3, 4}, torch::kComplexFloat).conj();
  read.at("neg") = torch::_neg_view(torch::zeros({3, 4}));
  load({.tensors = read}, file("strides.pt"));
  for (const auto& [key, value] : read) {
    EXPECT_TRUE(torch::equal(value.to(whole.at(key).scalar_type()), whole.at(key))) << key;
  }
}

TEST_F(ForeignFormats, PythonReadsWhatIsConvertedFromThem) {
  TemporaryFolder out;
  std::string arguments;
  for (const std::string name :
       {"strides.pt", "strides_old.pt", "held.pt", "module.pt", "script.pt", "dtypes_old.pt"}) {
    if (name == "dtypes_old.pt") {
      EXPECT_THAT(message_of<c10::ValueError>([&] { convert_checkpoint(file(name), out / name); }),
                  AllOf(HasSubstr("complex128"), HasSubstr("safetensors files cannot hold")));
      continue;
    }
    convert_checkpoint(file(name), out / name);
    arguments += " " + file(name + ".expected") + " " + (out / (name + "/model"));
  }
  EXPECT_EQ(run_python("compare_bytes.py", arguments), 0);
}

// Every dtype that the format has, written by us and read by Python.
TEST_F(ForeignFormats, PythonReadsEveryDtypeThatIsSaved) {
  Tensors read = tensors_like(file("dtypes.pt"));
  load({.tensors = read}, file("dtypes.pt"));
  Tensors kept;
  for (const auto& [name, tensor] : read) {
    if (files::dtype_name(tensor.scalar_type())) kept[name] = tensor;
  }
  EXPECT_EQ(kept.size(), 19);
  TemporaryFolder out;
  save({.tensors = kept}, out / "saved");
  EXPECT_EQ(run_python("compare_bytes.py",
                       "--some " + file("dtypes.pt.expected") + " " + (out / "saved/tensors")),
            0);
}

// Damage ends in an error or in a result, never in a crash or without end.
TEST_F(ForeignFormats, DamagedFilesDoNotCrash) {
  TemporaryFolder folder;
  std::mt19937 random(5);
  for (const std::string name : {"held_old.pt", "odd.pt", "module_old.pt", "odd.safetensors"}) {
    const std::string whole = *files::read_file(file(name));
    for (int round = 0; round < 400; ++round) {
      std::string damaged = whole;
      if (round % 4 == 0) damaged.resize(random() % whole.size());
      for (int change = 0; change < 1 + round % 3 && !damaged.empty(); ++change) {
        damaged[random() % damaged.size()] = static_cast<char>(random());
      }
      std::ofstream(folder / "file", std::ios::binary | std::ios::trunc) << damaged;
      const auto catalog = files::catalog_of_files(folder / "file");
      const std::string text = catalog.ok() ? folder / "file" : catalog.status().ToString();
      EXPECT_THAT(text, HasSubstr(folder / "file"));
    }
  }
}

}  // namespace
}  // namespace fsdp::testing
