// The default process group: which rank this process (or thread) is, and how it reaches
// the others.
//
//   fsdp::init_process_group();        // torchrun, srun and mpirun set the environment this reads
//   ...
//   fsdp::destroy_process_group();     // waits for what is in flight
//
// A rank may also be a thread: init_process_group({.store = store, .rank = r, .world_size
// = w}) with a store sets the calling thread's default group only.
#pragma once

#include "device_mesh/api.h"

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace fsdp {

// Holds an optional rendezvous store; converts from a pointer to any c10d store. Lets
// this header stay free of c10d.
class FSDP_API StoreHandle {
 public:
  StoreHandle();
  StoreHandle(c10::intrusive_ptr<c10d::Store> store);
  template <class DerivedStore>
  StoreHandle(c10::intrusive_ptr<DerivedStore> store)
      : StoreHandle(c10::intrusive_ptr<c10d::Store>(std::move(store))) {}
  StoreHandle(const StoreHandle&);
  StoreHandle& operator=(const StoreHandle&);
  ~StoreHandle();

  explicit operator bool() const;
  const c10::intrusive_ptr<c10d::Store>& get() const;

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

struct ProcessGroupOptions {
  // "gloo", "nccl" or "fake"; empty: that of the accelerator which the process sees, nccl
  // for CUDA, else gloo.
  std::string backend = {};
  StoreHandle store = {};  // explicit rendezvous; the group then belongs to the calling thread
  int64_t rank =
      -1;  // with `world_size`: replaces what the environment says; required with a store
  int64_t world_size = -1;
  std::chrono::milliseconds timeout =
      std::chrono::minutes(10);  // of the rendezvous and of one collective
};

// The place of this process in its job, as its launcher tells it: RANK WORLD_SIZE
// LOCAL_RANK, else SLURM_PROCID SLURM_NTASKS SLURM_LOCALID, else
// OMPI_COMM_WORLD_{RANK,SIZE,LOCAL_RANK}, else PMI_RANK PMI_SIZE, else a world of one.
struct LaunchEnvironment {
  int64_t rank = 0;
  int64_t world_size = 1;
  int64_t local_rank = 0;
  std::string master_addr = {};
  int64_t master_port = 29500;
};
// Local. Throws ValueError naming the variable, its value and what is allowed.
[[nodiscard]] FSDP_API LaunchEnvironment launch_environment();

// Collective over the world ("fake": local). Throws ValueError for a world above 1
// without MASTER_ADDR, an unknown backend, a rank outside the world, a rank that is there
// twice, unequal world sizes, an interface in GLOO_SOCKET_IFNAME (one, or several between
// commas) that is not there, or when a default group exists already. Throws a
// c10::DistError, on all ranks that are there and within the timeout and 5 s, where ranks
// are missing, which it names, or cannot reach each other. Where SIGPIPE has its default
// action, a write to a peer that has ended is an error with a text from here on, and only
// a reader of standard output or error that is gone still ends the process; and LibTorch
// heeds TORCH_CPP_LOG_LEVEL.
FSDP_API void init_process_group(ProcessGroupOptions options = {});
[[nodiscard]] FSDP_API bool is_process_group_initialized();
// Local. The calling thread's group if it has one, else the process's; good until
// destroy_process_group(). Throws when there is none. To do more with it than to hand it
// on, include <torch/csrc/distributed/c10d/ProcessGroup.hpp>.
FSDP_API const c10::intrusive_ptr<c10d::ProcessGroup>& default_process_group();
// Waits for what is in flight, also for saves in the background, then ends the default
// group and every group made from it: collectives of meshes that still hold them are
// refused. Once all are ended, throws what went wrong in a save and nobody was told yet.
FSDP_API void destroy_process_group();

}  // namespace fsdp
