// Files that no program writes: made to mislead, or by a mistake. Each is refused by its
// name and what is wrong with it, before anything is read or allocated by what it claims.
#include "checkpoint/checkpoint.h"
#include "checkpoint/convert.h"
#include "checkpoint/files/errors.h"
#include "checkpoint/files/file_calls.h"
#include "checkpoint/files/file_checks.h"
#include "checkpoint/format/pickle/pickle.h"
#include "checkpoint/format/torch_file/pickled_tensors.h"
#include "checkpoint/inspect.h"
#include "tests/support/errors.h"
#include "tests/support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

namespace files = internal::checkpoint;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

const std::string kDcp = "tests/checkpoint/fixtures/dcp";

void write_bytes(const std::string& path, const std::string& bytes) {
  std::filesystem::remove(path);  // a copy may be read-only
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

void write_safetensors(const std::string& path, const std::string& header, size_t data_bytes) {
  const uint64_t length = header.size();
  std::string head(sizeof(length), '\0');
  std::memcpy(head.data(), &length, sizeof(length));
  write_bytes(path, head + header + std::string(data_bytes, '\0'));
}

// One float called "w".
void write_one(const std::string& path) {
  write_safetensors(path, R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4);
}

std::string why_not_loaded(const std::string& path) {
  const auto w = torch::zeros({1});
  return message_of([&] { load({.tensors = {{"w", w}}}, path); });
}

std::string why_not_described(const std::string& path) {
  return message_of([&] { EXPECT_EQ(describe_checkpoint(path), "an error"); });
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size()))
    text.replace(at, from.size(), to);
  return text;
}

// The folder of torch.distributed.checkpoint among the fixtures, with other metadata.
std::string dcp_with(const TemporaryFolder& folder, const std::string& from,
                     const std::string& to) {
  const std::string path = folder / "dcp", whole = *files::read_file(kDcp + "/.metadata");
  if (!std::filesystem::exists(path)) std::filesystem::copy(kDcp, path);
  const std::string changed = replaced(whole, from, to);
  EXPECT_NE(changed, whole) << from;
  write_bytes(path + "/.metadata", changed);
  return path;
}

TEST(MadeFiles, NamesOfFilesStayInTheirFolder) {
  for (const std::string name : {"a", "a.b", "text/a", "..a", "a..", "./a", "...", "a/..b"})
    EXPECT_TRUE(files::stays_in_folder(name)) << name;
  for (const std::string name : {"", ".", "..", "/a", "../a", "a/../b", "a/..", "a/", "a/."})
    EXPECT_FALSE(files::stays_in_folder(name)) << name;
  EXPECT_FALSE(files::stays_in_folder(std::string("a\0b", 3)));
}

TEST(MadeFiles, AnIndexThatLeadsOutOfItsFolderIsRefused) {
  TemporaryFolder folder;
  write_one(folder / "secret.safetensors");
  std::filesystem::create_directory(folder / "model");
  for (const std::string index : {"model.safetensors.index.json", "pytorch_model.bin.index.json"}) {
    for (const auto& name :
         std::vector<std::string>{"../secret.safetensors", "", "x/../../secret.safetensors",
                                  folder / "secret.safetensors"}) {
      write_bytes(folder / ("model/" + index), R"({"weight_map":{"w":")" + name + R"("}})");
      const auto told = AllOf(HasSubstr(index + ": it names the file '" + name + "' for 'w'"),
                              HasSubstr("outside of its folder"));
      EXPECT_THAT(why_not_loaded(folder / "model"), told);
      EXPECT_THAT(why_not_described(folder / ("model/" + index)), told);
    }
    files::remove_file(folder / ("model/" + index)).IgnoreError();
  }
}

TEST(MadeFiles, MetadataThatLeadsOutOfItsFolderIsRefused) {
  TemporaryFolder folder;
  for (const std::string name : {"../../../etc", "/etc/x/y/z/w"}) {
    const std::string path = dcp_with(folder, "__0_0.distcp", name);
    EXPECT_THAT(why_not_described(path),
                AllOf(HasSubstr(".metadata: it names the file '" + name + "' for 'model."),
                      HasSubstr("outside of its folder")));
  }
}

// What is wrong with an entry "w" of a safetensors file with 4 bytes of data.
std::string why_not_read(const TemporaryFolder& folder, const std::string& entry,
                         const std::string& sharding = "") {
  std::string header = R"({"w":)" + entry + "}";
  if (!sharding.empty()) {
    header = R"({"__metadata__":{"DCP_SHARDING_INFO":")" + replaced(sharding, "\"", "\\\"") +
             R"("},"w":)" + entry + "}";
  }
  write_safetensors(folder / "file", header, 4);
  const std::string why = why_not_described(folder / "file");
  EXPECT_THAT(why, AllOf(HasSubstr("file: entry 'w': "), Not(HasSubstr("json.exception"))));
  return why;
}

TEST(MadeFiles, SizesThatAreNoWholeNumbersAreRefusedByNameOfTheTensor) {
  TemporaryFolder folder;
  for (const std::string size : {"1.5", "\"1\"", "true", "null", "[1]", "18446744073709551615"}) {
    EXPECT_THAT(
        why_not_read(folder, R"({"dtype":"F32","shape":[)" + size + R"(],"data_offsets":[0,4]})"),
        HasSubstr("holds " + size + ", which is no number that a size"));
    EXPECT_THAT(
        why_not_read(folder, R"({"dtype":"F32","shape":[1],"data_offsets":[0,)" + size + "]}"),
        HasSubstr("holds " + size));
    const std::string good = R"({"dtype":"F32","shape":[1],"data_offsets":[0,4]})";
    EXPECT_THAT(why_not_read(folder, good, R"({"w":{"saved_offsets":[)" + size + "]}}"),
                HasSubstr("holds " + size));
    EXPECT_THAT(
        why_not_read(folder, good, R"({"w":{"saved_offsets":[0],"global_shape":[)" + size + "]}}"),
        HasSubstr("holds " + size));
  }
  EXPECT_THAT(why_not_read(folder, R"({"dtype":"F32","shape":[-1],"data_offsets":[0,4]})"),
              HasSubstr("impossible shape [-1]"));
  EXPECT_THAT(why_not_read(folder, R"({"dtype":"F32","shape":3,"data_offsets":[0,4]})"),
              HasSubstr("3 is no list of numbers"));
  for (const std::string entry : {R"({"dtype":"F32","shape":[1]})", R"([])", R"("w")",
                                  R"({"dtype":7,"shape":[1],"data_offsets":[0,4]})"}) {
    EXPECT_THAT(why_not_read(folder, entry), HasSubstr("by dtype, shape and data_offsets"));
  }
}

TEST(MadeFiles, SizesThatNoMemoryHasAreRefusedByNameOfTheTensor) {
  TemporaryFolder folder;
  const std::string good = R"({"dtype":"F32","shape":[1],"data_offsets":[0,4]})";
  const std::string most = std::to_string(INT64_MAX), large = "4294967296";
  EXPECT_THAT(
      why_not_read(folder, good, R"({"w":{"saved_offsets":[0],"global_shape":[)" + most + "]}}"),
      HasSubstr("bad global_shape"));
  EXPECT_THAT(why_not_read(folder, good, R"({"w":{"saved_offsets":[)" + most + "]}}"),
              HasSubstr("bad saved_offsets"));
  const std::string cube = "[" + large + "," + large + "," + large + "]";
  EXPECT_THAT(
      why_not_read(folder, R"({"dtype":"F32","shape":)" + cube + R"(,"data_offsets":[0,4]})"),
      HasSubstr("impossible shape"));
  EXPECT_THAT(why_not_read(folder, R"({"dtype":"F32","shape":[0,)" + large + "," + large +
                                       R"(],"data_offsets":[0,4]})"),
              HasSubstr("impossible shape"));
}

TEST(MadeFiles, TextsThatAreNotJsonAreToldWithoutTheNamesOfALibrary) {
  TemporaryFolder folder;
  for (const std::string header :
       {"{\"w\":", "{\"w\":{}", "{w}", "{\"a\":1,\"a\":1}", "{\"w\":1e999}"}) {
    write_safetensors(folder / "file", header, 4);
    EXPECT_THAT(why_not_described(folder / "file"),
                AllOf(HasSubstr("file: "), Not(HasSubstr("json.exception")), Not(HasSubstr("_M_"))))
        << header;
  }
  for (const std::string index :
       {"{", "{}", R"({"weight_map":[]})", R"({"weight_map":{"w":1}})", R"({"weight_map":{}})"}) {
    write_bytes(folder / "index.json", index);
    EXPECT_THAT(why_not_described(folder / "index.json"),
                AllOf(HasSubstr("index.json: "), Not(HasSubstr("json.exception"))))
        << index;
  }
}

TEST(MadeFiles, AnIndexDecidesInWhichFileATensorIs) {
  TemporaryFolder folder;
  const auto one = torch::full({2}, 1.0), two = torch::full({2}, 2.0);
  save({.tensors = {{"w", one}, {"v", one}}}, folder / "one");
  save({.tensors = {{"w", two}, {"u", two}}}, folder / "two");
  for (const std::string name : {"one", "two"}) {
    std::filesystem::copy(folder / (name + "/tensors/model.safetensors"),
                          folder / (name + ".safetensors"));
  }
  const std::string index = folder / "model.safetensors.index.json";
  for (const std::string name : {"one", "two"}) {
    write_bytes(index, R"({"weight_map":{"v":"one.safetensors","u":"two.safetensors","w":")" +
                           name + R"(.safetensors"}})");
    auto w = torch::zeros({2}), u = torch::zeros({2}), v = torch::zeros({2});
    load({.tensors = {{"w", w}, {"u", u}, {"v", v}}}, folder.path());
    EXPECT_TRUE(torch::equal(w, name == "one" ? one : two));
    EXPECT_TRUE(torch::equal(u, two) && torch::equal(v, one));
  }
  write_bytes(index, R"({"weight_map":{"v":"two.safetensors","w":"one.safetensors"}})");
  EXPECT_THAT(describe_checkpoint(folder.path()),
              HasSubstr("not read: v, not in " + (folder / "two.safetensors") +
                        ", where the index has it"));
}

TEST(MadeFiles, WhatAnIndexHasAndNoFileIsMissedByWhoAsksForItAlone) {
  TemporaryFolder folder;
  write_one(folder / "one.safetensors");
  write_bytes(folder / "model.safetensors.index.json",
              R"({"weight_map":{"w":"one.safetensors","v":"one.safetensors"}})");
  const auto w = torch::ones({1}), v = torch::ones({1});
  const LoadResult loaded = load({.tensors = {{"w", w}}}, folder.path());
  EXPECT_EQ(w.item<float>(), 0);
  EXPECT_THAT(loaded.unexpected, IsEmpty());
  EXPECT_THAT(loaded.skipped, ElementsAre("v"));
  EXPECT_THAT(message_of([&] {
                load({.tensors = {{"w", w}, {"v", v}}}, folder.path());
              }),
              AllOf(HasSubstr("missing in the file: v"), Not(HasSubstr("in the file only")),
                    HasSubstr("'v' is not in " + (folder / "one.safetensors"))));
}

TEST(MadeFiles, ATensorInTwoFilesWithoutAnIndexIsNotReadAndLeavesTheRestReadable) {
  TemporaryFolder folder;
  std::filesystem::create_directory(folder / "model");
  write_one(folder / "model/one.safetensors");
  write_safetensors(folder / "model/two.safetensors",
                    R"({"v":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                    R"("w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
                    8);
  const auto told = AllOf(HasSubstr("in two files, "), HasSubstr("one.safetensors and "),
                          HasSubstr("two.safetensors, and no index says which counts"));
  EXPECT_THAT(why_not_loaded(folder / "model"),
              AllOf(HasSubstr("missing in the file: w"), HasSubstr("'w' is in two"), told));
  const auto v = torch::ones({1});
  const LoadResult rest =
      load({.tensors = {{"v", v}}}, folder / "model", LoadOptions{.strict = false});
  EXPECT_EQ(v.item<float>(), 0);
  EXPECT_THAT(rest.skipped, ElementsAre("w"));
  EXPECT_THAT(describe_checkpoint(folder / "model"), AllOf(HasSubstr("not read: w, in two"), told));
  std::filesystem::create_directory(folder / "bins");
  const auto archive = *files::read_file("tests/checkpoint/fixtures/state_dict.pt");
  for (const std::string name : {"model_a.bin", "model_b.bin"})
    write_bytes(folder / ("bins/" + name), archive);
  EXPECT_THAT(describe_checkpoint(folder / "bins"),
              AllOf(HasSubstr("model_a.bin and "), HasSubstr("model_b.bin, and no index")));
}

TEST(MadeFiles, AGitLfsPointerIsToldAsSuchWhereverItStands) {
  const std::string pointer =
      "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n";
  const auto told = HasSubstr(": a Git LFS pointer, not the file that it stands for");
  TemporaryFolder folder;
  const auto expect_told = [&](const std::string& path) {
    EXPECT_THAT(why_not_loaded(path), told) << path;
    EXPECT_THAT(why_not_described(path), told) << path;
    EXPECT_THAT(message_of([&] { load(State{}, path); }), told) << path;
    EXPECT_THAT(message_of([&] { convert_checkpoint(path, folder / "to"); }), told) << path;
    EXPECT_FALSE(std::filesystem::exists(folder / "to"));
  };
  write_bytes(folder / "file.pt", pointer);
  expect_told(folder / "file.pt");
  for (const std::string name : {"model.safetensors", "pytorch_model.bin", ".metadata",
                                 "model.safetensors.index.json", "checkpoint.json"}) {
    const std::string path = folder / ("in_" + name);
    std::filesystem::create_directory(path);
    write_bytes(path + "/" + name, pointer);
    expect_told(path);
  }
  std::filesystem::copy(kDcp, folder / "dcp");
  write_bytes(folder / "dcp/__0_0.distcp", pointer);
  EXPECT_THAT(message_of([&] { convert_checkpoint(folder / "dcp", folder / "to"); }), told);
  save({.tensors = {{"w", torch::ones({1})}}}, folder / "saved");
  write_bytes(folder / "saved/tensors/model.safetensors", pointer);
  expect_told(folder / "saved");
  EXPECT_THAT(message_of([&] { verify_checkpoint(folder / "saved"); }), told);
}

std::string repeated(const std::string& text, size_t times) {
  std::string all;
  for (size_t i = 0; i < times; ++i) all += text;
  return all;
}

// A few bytes of a pickle's program copy a value that it remembers.
TEST(MadeFiles, PicklesThatCopyWhatTheyHoldAreBounded) {
  const auto why_not_parsed = [](const std::string& program) {
    return std::string(files::Pickle::parse(program + "N.", "p").status().message());
  };
  // A dictionary of named arguments, a class, no arguments; then calls that are dropped.
  const std::string names = "}(" + repeated("K\1K\1", 4200) + "uq" + std::string(1, '\0');
  const std::string call = "h\1h\2h" + std::string(1, '\0') + "\x92" + "0";
  const std::string begin = names + "cmodule\nname\nq\1)q\2";
  EXPECT_EQ(why_not_parsed(begin + repeated(call, 100)), "");
  EXPECT_THAT(why_not_parsed(begin + repeated(call, 4200)), HasSubstr("it holds too much"));
  // A long text, that is both names of a class.
  const std::string text = "X" + std::string("\0\0\1\0", 4) + std::string(1 << 16, 'a') + "q\1";
  const std::string global = std::string("h\1h\1\x93") + "0";
  EXPECT_EQ(why_not_parsed(text + repeated(global, 20)), "");
  EXPECT_THAT(why_not_parsed(text + repeated(global, 2100)), HasSubstr("it holds too much"));
}

// A tensor of one float of what stands for its storage in a pickle's program.
files::PickledTensors tensor_of(const std::string& storage) {
  const auto pickle = files::Pickle::parse(
      "ctorch._utils\n_rebuild_tensor_v2\n(" + storage + "I0\n(I1\nt(I1\nttR.", "p");
  EXPECT_TRUE(pickle.ok()) << pickle.status();
  return files::tensors_in(*pickle);
}

TEST(MadeFiles, TensorsOfWhatIsNoStorageAreNotRead) {
  const auto kept_apart = [](const std::string& kind) {
    return "(S'" + kind + "'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI1\ntQ";
  };
  EXPECT_EQ(tensor_of(kept_apart("storage")).tensors.size(), 1u);
  for (const auto& other : {kept_apart("module"), std::string("N"), std::string("I1\n")}) {
    const auto found = tensor_of(other);
    EXPECT_THAT(found.tensors, IsEmpty()) << other;
    EXPECT_EQ(found.unread.size(), 1u) << other;
  }
}

// A box of one float, at the end of a tensor that is said to take 2^52 bytes.
TEST(MadeFiles, NothingIsAllocatedForWhatAFileClaimsAndLacks) {
  TemporaryFolder folder;
  const std::string claimed = std::to_string(int64_t{1} << 50);
  write_safetensors(folder / "file",
                    R"({"__metadata__":{"DCP_SHARDING_INFO":"{\"w\":{\"saved_offsets\":[3],)"
                    R"(\"global_shape\":[)" +
                        claimed + R"(]}}"},"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
                    4);
  EXPECT_THAT(message_of([&] { convert_checkpoint(folder / "file", folder / "to"); }),
              AllOf(HasSubstr("convert: " + (folder / "file") + ": 'w' [0:" + claimed + "]"),
                    HasSubstr("only 1 of its " + claimed + " elements are in the files")));
  EXPECT_FALSE(std::filesystem::exists(folder / "to"));
}

TEST(MadeFiles, WhatConvertRefusesBeginsWithTheFile) {
  TemporaryFolder folder;
  const auto message = [&](const std::string& name, const std::string& bytes) {
    const std::string path = folder / name;
    if (!bytes.empty()) write_bytes(path, bytes);
    const std::string text = message_of([&] { convert_checkpoint(path, folder / "to"); });
    EXPECT_TRUE(text.starts_with("convert: " + path + ": ")) << text;
    EXPECT_EQ(text.find(path, text.find(path) + 1), std::string::npos) << text;
    return text;
  };
  EXPECT_THAT(message("nowhere", ""), HasSubstr("no such checkpoint"));
  EXPECT_THAT(message("page", "<html>"), HasSubstr("a web page"));
  EXPECT_THAT(message("cut", std::string("\x10\0\0\0\0\0\0\0{", 9)), HasSubstr("a header of 16"));
  write_safetensors(folder / "odd", R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4);
  EXPECT_THAT(message("odd", ""), HasSubstr("entry 'w': data_offsets [0,4] do not hold 8 bytes"));
}

// Bytes at random behind what a zip archive begins with, and archives that are cut.
TEST(MadeFiles, ArchivesThatAreNoneAreToldWithoutTheNamesOfALibrary) {
  TemporaryFolder folder;
  const std::string whole = *files::read_file("tests/checkpoint/fixtures/state_dict.pt");
  for (const size_t kept : {size_t{4}, size_t{40}, whole.size() / 2, whole.size() - 1}) {
    write_bytes(folder / "file.pt", whole.substr(0, kept));
    EXPECT_THAT(why_not_described(folder / "file.pt"),
                AllOf(HasSubstr("file.pt: not a file of torch.save that can be read: "),
                      Not(HasSubstr("enforce fail")), Not(HasSubstr("INTERNAL ASSERT")),
                      Not(HasSubstr("frame #")), Not(HasSubstr("_M_"))))
        << kept;
  }
}

TEST(MadeFiles, ExceptionsOfLibrariesAreToldPlainly) {
  const auto text = [](const std::exception& error) { return files::plain_text_of(error); };
  EXPECT_EQ(text(std::bad_alloc()), "it takes more memory than there is");
  EXPECT_EQ(text(std::runtime_error("[json.exception.type_error.302] type must be number")),
            "type must be number");
  EXPECT_EQ(text(std::runtime_error("[enforce fail at inline_container.cc:145] . it failed")),
            "it failed");
  EXPECT_EQ(text(std::runtime_error("p INTERNAL ASSERT FAILED at \"x.cpp\":1, please report a bug "
                                    "to PyTorch. it failed")),
            "it failed");
  EXPECT_EQ(text(std::runtime_error("[2] is no list")), "[2] is no list");
  EXPECT_THAT(message_of([&] {
                try {
                  std::vector<int>().at(3) = 1;
                } catch (const std::exception& error) {
                  throw std::runtime_error(text(error));
                }
              }),
              HasSubstr("refers to something that it does not hold"));
}

// The second of two shards alone.
TEST(MadeFiles, ABoxOfATensorIsNotCalledWhole) {
  const std::string text = describe_checkpoint(
      "tests/checkpoint/fixtures/shards/shard-00002-model-00001-of-00001.safetensors");
  EXPECT_THAT(text, AllOf(HasSubstr(" 1 box\n"), Not(HasSubstr("1 boxes"))));
}

// "first.weight" has the shape [7, 5], in Python's pickle two numbers and a tuple of
// them.
std::string dcp_with_rows(const TemporaryFolder& folder, const std::string& rows) {
  const std::string columns = "K\x05\x86";
  return dcp_with(folder, "K\x07" + columns, rows + columns);
}

TEST(MadeFiles, SizesInMetadataThatAreNoWholeNumbersLeaveTheRestReadable) {
  const std::string half = "G?\xe0" + std::string(6, '\0');  // 0.5
  for (const std::string& rows : {half, std::string("\x88"),
                                  std::string("U\x01"
                                              "3"),
                                  std::string("J\xff\xff\xff\xff")}) {
    TemporaryFolder folder;
    const std::string path = dcp_with_rows(folder, rows);
    EXPECT_THAT(describe_checkpoint(path),
                AllOf(HasSubstr("not read: model.first.weight, a tensor that has a size or an "
                                "offset that is no whole number from 0 on"),
                      HasSubstr("    model.first.bias ")));
  }
}

TEST(MadeFiles, NothingIsAllocatedForWhatMetadataClaimsAndFilesLack) {
  TemporaryFolder folder;
  const std::string claimed("\x8a\x07\0\0\0\0\0\0\x04", 9);  // 2^50
  const std::string path = dcp_with_rows(folder, claimed);
  EXPECT_THAT(message_of([&] { convert_checkpoint(path, folder / "to"); }),
              HasSubstr("convert: " + path +
                        ": 'model.first.weight' [0:1125899906842624, 0:5]: only 35 of its "
                        "5629499534213120 elements are in the files"));
}

}  // namespace
}  // namespace fsdp::testing
