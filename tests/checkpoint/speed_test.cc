// Speed, as ratios of interleaved minima on one rank. By hand, on a quiet machine:
//   checkpoint_test --gtest_also_run_disabled_tests --gtest_filter='*Speed*'
// SPEED_PATH chooses the file system; default: the temporary folder.
#include "checkpoint/async_save.h"
#include "checkpoint/files/checksums.h"
#include "checkpoint/files/file_calls.h"
#include "tests/checkpoint/seconds_of.h"
#include "tests/checkpoint/small_model.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

namespace fsdp::testing {
namespace {

using internal::checkpoint::OutputFile;

constexpr int64_t kBytes = int64_t{256} << 20;
constexpr int64_t kPiece = int64_t{8} << 20;
constexpr int kTensors = 16;
constexpr int kRounds = 7;

struct Weights : torch::nn::Module {
  Weights() {
    for (int i = 0; i < kTensors; ++i) {
      register_parameter("w" + std::to_string(i), torch::rand({kBytes / 4 / kTensors}));
    }
  }
};

class Speeds {
 public:
  explicit Speeds(std::string folder) : folder_(std::move(folder)) {}

  // One round; the smallest of all rounds counts.
  void measure() {
    const auto fresh = [&](const char* name) {
      const std::string path = folder_ + "/" + name;
      internal::checkpoint::remove_tree(path).IgnoreError();
      return path;
    };
    const std::string raw = fresh("raw"), torch_file = fresh("torch"), saved = fresh("saved"),
                      background = fresh("background");
    note("write and fsync", [&] { write_raw(raw); });
    note("torch::save", [&] { torch::save(weights_, torch_file); });
    internal::checkpoint::remove_tree(torch_file).IgnoreError();
    note("torch::save and fsync", [&] {
      torch::save(weights_, torch_file);
      sync(torch_file);
    });
    note("save", [&] { save({.model = weights_}, saved); });
    note("pread", [&] { read_raw(raw); });
    note("torch::load", [&] { torch::load(weights_, torch_file); });
    note("load", [&] { load({.model = weights_}, saved); });
    note("hash", [&] { hash(); });
    note("memcpy", [&] { copy(); });
    SaveHandle saving;
    note("async_save", [&] { saving = async_save({.model = weights_}, background); });
    saving.wait();
  }

  double operator[](const std::string& what) const { return seconds_.at(what); }
  void print() const {
    for (const auto& [what, seconds] : seconds_) {
      std::printf("  %-22s %7.3f s  %6.2f GB/s\n", what.c_str(), seconds, kBytes / seconds / 1e9);
    }
  }

 private:
  void note(const std::string& what, const std::function<void()>& body) {
    const double seconds = seconds_of(body);
    const auto [place, is_new] = seconds_.try_emplace(what, seconds);
    if (!is_new) place->second = std::min(place->second, seconds);
  }

  void write_raw(const std::string& path) {
    auto file = OutputFile::create(path).value();
    for (const auto& weight : weights_->parameters()) {
      for (int64_t at = 0; at < static_cast<int64_t>(weight.nbytes()); at += kPiece) {
        const auto* data = static_cast<const char*>(weight.const_data_ptr());
        const auto left = static_cast<int64_t>(weight.nbytes()) - at;
        ASSERT_TRUE(file.write(data + at, std::min(kPiece, left)).ok());
      }
    }
    ASSERT_TRUE(file.sync_and_close().ok());
  }

  static void sync(const std::string& path) {
    const int file = ::open(path.c_str(), O_RDONLY);
    ASSERT_GE(file, 0);
    EXPECT_EQ(::fsync(file), 0);
    ::close(file);
  }

  void read_raw(const std::string& path) {
    const auto file = internal::checkpoint::InputFile::open(path).value();
    int64_t at = 0;
    for (const auto& weight : weights_->parameters()) {
      const auto bytes = static_cast<int64_t>(weight.nbytes());
      ASSERT_TRUE(file.read_at(weight.mutable_data_ptr(), bytes, at).ok());
      at += bytes;
    }
  }

  void hash() {
    internal::checkpoint::ChecksumWriter sums;
    for (const auto& weight : weights_->parameters()) {
      sums.update(weight.const_data_ptr(), static_cast<int64_t>(weight.nbytes()));
    }
    EXPECT_FALSE(sums.finish().empty());
  }

  void copy() {
    copies_.resize(kBytes);
    char* next = copies_.data();
    for (const auto& weight : weights_->parameters()) {
      std::memcpy(next, weight.const_data_ptr(), weight.nbytes());
      next += weight.nbytes();
    }
  }

  const std::string folder_;
  std::shared_ptr<Weights> weights_ = std::make_shared<Weights>();
  std::vector<char> copies_;
  std::map<std::string, double> seconds_;
};

TEST(DISABLED_Speed, OfSavingAndLoading) {
  TemporaryFolder folder;
  const char* place = std::getenv("SPEED_PATH");
  Speeds speeds(place == nullptr ? folder.path() : place);
  for (int round = 0; round < kRounds; ++round) speeds.measure();
  speeds.print();
  std::printf("save / write and fsync   %.2f (allowed 1.15)\n",
              speeds["save"] / speeds["write and fsync"]);
  std::printf(
      "save / torch::save       %.2f (allowed 1.00 on tmpfs, where no disk is waited for)\n",
      speeds["save"] / speeds["torch::save"]);
  std::printf("save / the same, fsync   %.2f (allowed 1.00)\n",
              speeds["save"] / speeds["torch::save and fsync"]);
  std::printf("load / pread             %.2f (allowed 1.25)\n", speeds["load"] / speeds["pread"]);
  std::printf("hash / save              %.2f (allowed 0.30 on tmpfs)\n",
              speeds["hash"] / speeds["save"]);
  std::printf("async_save / memcpy      %.2f (allowed 1.50)\n",
              speeds["async_save"] / speeds["memcpy"]);
}

}  // namespace
}  // namespace fsdp::testing
