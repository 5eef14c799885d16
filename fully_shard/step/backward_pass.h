// One backward over the groups of a context: reductions leave in one fixed order, and the
// end of the outermost graph task makes their results visible. See docs/design.md,
// "Backward".
//
// A backward that throws never reaches its end; it is aborted instead: partial gradients
// are dropped, what is in flight is waited for, and the groups go back to sharded, so the
// next step is clean.
#pragma once

#include "fully_shard/step/gradient_buffer.h"
#include "fully_shard/transport/transport.h"

#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <vector>

namespace fsdp::internal {

class CommContext;
class ParamGroup;

class BackwardPass {
 public:
  explicit BackwardPass(CommContext& context);
  ~BackwardPass();

  // A group was touched by a forward that records gradients.
  void note_forward(ParamGroup& group);
  // A group was touched, or received a gradient, inside a backward: the pass has begun
  // and will be ended.
  void note_backward(ParamGroup& group);
  // Sends what the fixed order allows by now.
  void send_ready();
  // A gradient came after its group's reduction had left; its group waits for the end.
  void note_late() { late_ = GradientBuffer::Late::kSome; }
  void remove(ParamGroup& group);

  // False: the end of the next backwards leaves results invisible and groups unsharded,
  // until one that is the last.
  void set_is_last_backward(bool is_last) { is_last_backward_ = is_last; }

 private:
  class EndOfGraphTask;
  struct Sent;

  void begin_graph_task(ParamGroup& group, int task);
  void end_graph_task(int id, bool completed);
  void finish();
  void send_late();
  void abort() noexcept;
  void send(ParamGroup& group);
  void receive_in_flight();
  void publish_results();

  CommContext& context_;
  std::vector<int> graph_tasks_;            // outermost first
  std::vector<ParamGroup*> forward_order_;  // first touches that record gradients, not yet reduced
  std::vector<ParamGroup*> order_;          // of this backward's reductions
  size_t next_ = 0;                         // in order_: everything before has left
  size_t forced_ = 0;                       // in order_: everything before leaves, complete or not
  size_t last_touched_ = 0;                 // in order_: stays for the end, whatever is complete
  GradientBuffer::Late late_ = GradientBuffer::Late::kNone;  // on this rank
  std::vector<std::unique_ptr<Sent>> in_flight_;
  std::vector<std::unique_ptr<Sent>> results_;
  bool is_last_backward_ = true;
  bool accumulates_ =
      true;  // into every leaf of the graph: not autograd::grad, nor backward with inputs
};

}  // namespace fsdp::internal
