// Starts the ranks of a job on this machine, as processes of the running program.
//
//   int main(int argc, char** argv) {
//     if (auto exit_code = programs::launch_ranks(2)) return *exit_code;   // the launcher
//     ...  // a rank: RANK, WORLD_SIZE, ... are set
//   }
//
// Under torchrun, srun or mpirun, which set the environment themselves, the program is a
// rank of their job.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

namespace programs {

// Returns nothing in a rank: the caller goes on. In the launcher it starts `ranks` copies
// of this program with the same arguments and with RANK, WORLD_SIZE, LOCAL_RANK,
// MASTER_ADDR and MASTER_PORT, waits for them, and returns the exit code. One rank needs
// no launcher. check: runs in the launcher before any rank does; what it throws is told
// once, not by every rank.
//
// SIGINT, SIGTERM or SIGHUP to the launcher stops every rank (exit code 128 + signal).
// When a rank fails, a message on stderr names it and the others are stopped (exit code
// 1); so are all ranks when the launcher itself is killed. Throws std::system_error when
// the ranks cannot be started, and ValueError for more of them than a machine like this
// one can run.
std::optional<int> launch_ranks(int64_t ranks, const std::function<void()>& check = {});

}  // namespace programs
