// What each rank of a mesh claims in a call that all of them are in, where ranks must
// claim alike: the one way in which calls find out that ranks do not mean the same.
//
//   Claims claims("GradScaler");
//   claims.add("the scale", 65536.0);
//   claims.check(mesh, "give every rank the same options");   // throws on all ranks alike:
//   // GradScaler: the ranks differ in the scale: rank 0 has 65536 where rank 1 has 32768;
//   // give every rank the same options (rank 1)
//
// The words may travel with what the call sends anyway, and cost no message then:
//
//   const auto rows = rows_of_all(dims, {.row = at::cat({own, claims.words()}), ...});
//   claims.check_words(rows.slice(1, n), mesh, "...");
//
// Two ranks are compared in the topics that both of them have.
#pragma once

#include "device_mesh/device_mesh.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::internal {

class Claims {
 public:
  // Topics beyond so many are not compared.
  static constexpr int64_t kTopics = 8, kWords = 2 * kTopics;

  // call: what errors begin with.
  explicit Claims(std::string call) : call_(std::move(call)) {}

  // Each topic once. text: a line for each thing, asked where ranks differ. hash: of all
  // that it says, the same on ranks that say the same.
  void add(std::string topic, uint64_t hash, std::function<std::string()> text);
  void add(std::string topic, const std::string& text);
  void add(std::string topic, double number);  // compared exactly
  // This rank can not do what is called: every rank throws `error`.
  void refuse(std::string error);

  // int64 [kWords], on the CPU.
  at::Tensor words() const;
  // Throws ValueError on every rank alike where one refuses, or where two differ, with
  // the first line in which their texts do. remedy: the end of the error. rows: int64
  // [ranks of `mesh`, kWords], by place, on the CPU. Collective over `mesh` where it
  // throws, local else.
  void check_words(const at::Tensor& rows, const DeviceMesh& mesh, const std::string& remedy) const;
  // The same, with a collective over `mesh` of its own. Waits for the device.
  void check(const DeviceMesh& mesh, const std::string& remedy) const;

 private:
  struct Claim {
    std::string topic;
    int64_t number;  // of the topic
    int64_t hash;
    std::function<std::string()> text;
  };
  std::string agreement() const { return "agreement of " + call_; }
  std::string text_of_topic(int64_t number) const;

  std::string call_;
  std::vector<Claim> claims_;
};

}  // namespace fsdp::internal
