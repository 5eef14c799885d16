// How ranks read one another's shards while these may be written: the versions of one
// unit's shards on one rank, as that rank tells of them and as the others look at them.
// Pure: where the words lie, and everything that blocks, is its caller's
// (shared_shards.h), so that a test explores every interleaving of this very code.
//
// Writes come in *runs*: all write operators between two reads by the same rank, or
// between two ends of a backward. What a rank wants to read is a version: the shards as
// they are when every rank has done as many operators in as many runs. A writer need not
// wait for readers, but for one that is kRunsKept runs behind. (SharedShards waits a
// little longer where that saves a copy.) When it opens a run it leaves the version
// before where it is, unless every other rank is about to open that run, too, and writes
// a copy of it at another place; a reader that comes late, or whose copy was written into
// meanwhile, reads what was left (a seqlock with a history).
//
//   writer                                       reader
//     versions.pass()         first of a run       own.read(line)   to read where they lie
//     versions.open(...)                           look(line, own.version())
//     versions.begin()                               kLive: copy, then still_live()?
//     peers: versions.was_read()? an error           kKept: copy what was kept
//     ... an operator writes ...                     kNotYet: wait; kNever: an error
//     versions.end(word)
//
// A reader need not copy what is live: it may read it where it lies until it opens a run
// of its own, since until then nobody writes there. A rank that opens one leaves it alone
// (may_want_this), and one that would write more in the same run has an error (was_read).
//
// A rank may write its shards where nobody sees it begin (an alias of them is out): it is
// *exposed*, and the others read nothing but copies that it publishes.
//
// Order of stores: what was kept, and the start of a run, before kRun (release), and that
// before kBegun (release); a full fence between kBegun and the first byte that the
// operator writes; kDone (release) after the last one. Readers load with acquire, and
// have an acquire fence between the copy and the second look.
//
// See docs/design/shared_memory.md.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fsdp::internal {

// The words of a line. Written by its rank alone.
class VersionWord {
 public:
  static constexpr size_t kRunsKept = 4;
  static constexpr size_t kCount = 10 + kRunsKept * 5;

  static constexpr size_t kRun = 0;      // runs opened
  static constexpr size_t kBegun = 1;    // operators begun, in all runs
  static constexpr size_t kDone = 2;     // and ended
  static constexpr size_t kExposed = 3;  // 0 or 1
  static constexpr size_t kSaid = 4;     // after the last one: the caller's word
  // What other ranks look at whenever they write: apart from what changes with each
  // operator, in another line of a cache.
  static constexpr size_t kPast = 8;  // runs whose last versions it does not read any more
  static constexpr size_t kRead = 9;  // operators in the version that it has read last
  // Of a run that is open or kept.
  static constexpr size_t start(uint64_t run) { return of(run, 0); }  // kBegun when it opened
  static constexpr size_t place(uint64_t run) { return of(run, 1); }  // where it writes
  static constexpr size_t kept(uint64_t run) { return of(run, 2); }   // where its last version is
  static constexpr size_t end(uint64_t run) { return of(run, 3); }    // kBegun of that version
  static constexpr size_t said(uint64_t run) { return of(run, 4); }

 private:
  static constexpr size_t of(uint64_t run, size_t word) { return 10 + run % kRunsKept * 5 + word; }
};

inline constexpr uint64_t kNoEnd = ~uint64_t{0};

// What a rank wants every other one's shards to be.
struct ShardVersion {
  uint64_t run = 0;
  uint64_t start = 0;  // operators before that run
  uint64_t count = 0;  // operators so far

  bool operator==(const ShardVersion&) const = default;
};

enum class Found : uint8_t {
  kLive,    // where that rank writes, as long as still_live()
  kKept,    // where it was kept
  kNotYet,  // that rank has not written as much
  kNever,   // it has written otherwise: more, or in other runs
};

struct Look {
  Found found = Found::kNotYet;
  uint64_t place = 0;  // the caller's words for it
  uint64_t said = 0;   // that rank's word of that version
};

// `Line`: load(word), acquire; store(word, value), relaxed; release(word, value);
// fence(), sequentially consistent; read_fence(), acquire.
template <class Line>
Look look(Line& line, const ShardVersion& wanted) {
  while (true) {
    const uint64_t run = line.load(VersionWord::kRun);
    if (run < wanted.run) {
      const bool wrote_more = run + 1 == wanted.run &&
                              line.load(VersionWord::kBegun) > wanted.start &&
                              line.load(VersionWord::kRun) == run;
      return {wrote_more ? Found::kNever : Found::kNotYet};
    }
    if (line.load(VersionWord::start(wanted.run)) != wanted.start) return {Found::kNever};
    const uint64_t end = line.load(VersionWord::end(wanted.run));
    if (end == wanted.count) {
      const Look kept{Found::kKept, line.load(VersionWord::kept(wanted.run)),
                      line.load(VersionWord::said(wanted.run))};
      if (line.load(VersionWord::end(wanted.run)) == end) return kept;
      continue;
    }
    if (run > wanted.run) return {Found::kNever};
    const uint64_t exposed = line.load(VersionWord::kExposed);
    const uint64_t done = line.load(VersionWord::kDone);
    const uint64_t begun = line.load(VersionWord::kBegun);
    const Look live{Found::kLive, line.load(VersionWord::place(run)),
                    line.load(VersionWord::kSaid)};
    if (line.load(VersionWord::kRun) != run) continue;
    if (begun > wanted.count) return {Found::kNever};
    if (done < wanted.count || exposed != 0) return {Found::kNotYet};
    return live;
  }
}

// After the bytes were copied, or before they are read where they lie: whether they are
// of that version.
template <class Line>
bool still_live(Line& line, const ShardVersion& wanted) {
  line.read_fence();
  return line.load(VersionWord::kBegun) == wanted.count && line.load(VersionWord::kExposed) == 0 &&
         line.load(VersionWord::kRun) == wanted.run;
}

// The writer's side of its own line. Used by one thread at a time.
class ShardVersions {
 public:
  // Of the last complete one.
  ShardVersion version() const { return {run_, start_, count_}; }
  bool is_writing() const { return is_writing_; }  // an operator has begun, and not ended
  bool is_in_run() const { return is_in_run_; }
  bool is_exposed() const { return is_exposed_; }
  bool is_published() const { return published_ == count_; }

  // Whether a rank that is past so many runs may still want the version that open()
  // leaves behind; and whether one may want the oldest, whose place open() needs.
  bool may_want_this(uint64_t past_of_other) const { return past_of_other <= run_; }
  bool may_want_oldest(uint64_t past_of_other) const {
    return past_of_other + VersionWord::kRunsKept <= run_ + 1;
  }

  // This rank is about to open a run, and so reads the version before no more. Said
  // before it waits for the others to say so, too.
  template <class Line>
  void pass(Line& line) const {
    line.release(VersionWord::kPast, run_ + 1);
  }
  // Begins a run that writes at `place`. kept: where the version before can be read from
  // now on; 0: no other rank may want it, or it was published. REQUIRES: !is_in_run(),
  // and nobody may want the oldest.
  struct NewRun {
    uint64_t place = 0;
    uint64_t kept = 0;
    uint64_t said = 0;  // of the version before
  };
  template <class Line>
  void open(Line& line, const NewRun& run) {
    if (!is_published()) publish_at(line, run.kept, run.said);
    ++run_;
    start_ = count_;
    published_ = kNoEnd;
    line.store(VersionWord::start(run_), start_);
    line.store(VersionWord::place(run_), run.place);
    line.store(VersionWord::end(run_), kNoEnd);
    line.release(VersionWord::kRun, run_);
    is_in_run_ = true;
  }
  // An operator is about to write. REQUIRES: is_in_run().
  template <class Line>
  void begin(Line& line) {
    ++count_;
    is_writing_ = true;
    line.release(VersionWord::kBegun, count_);  // not seen before its run
    line.fence();
  }
  // Of the operator that has begun.
  bool is_first_of_run() const { return count_ == start_ + 1; }
  // Before it writes anything: whether a rank whose kRead this is has read the version
  // that was there, which another operator of the same run made. It may still read it
  // where it lies.
  bool was_read(uint64_t read_by_other) const {
    return !is_first_of_run() && read_by_other == count_ - 1;
  }
  // The operators that have begun have written. said: travels with the version.
  template <class Line>
  void end(Line& line, uint64_t said) {
    is_writing_ = false;
    line.store(VersionWord::kSaid, said);
    line.release(VersionWord::kDone, count_);
  }
  // The next operator begins a run of its own. REQUIRES: !is_writing().
  void close() { is_in_run_ = false; }
  // This rank is about to look for version() on the others, to read it where it lies.
  // REQUIRES: !is_in_run().
  template <class Line>
  void read(Line& line) const {
    line.release(VersionWord::kRead, count_);
    line.fence();
  }

  // The version can be read at `kept`. REQUIRES: !is_writing().
  template <class Line>
  void publish(Line& line, uint64_t kept, uint64_t said) {
    line.release(VersionWord::end(run_), kNoEnd);
    publish_at(line, kept, said);
  }
  // From now on the others read what is published, and nothing else.
  template <class Line>
  void expose(Line& line) {
    is_exposed_ = true;
    line.release(VersionWord::kExposed, 1);
    line.fence();
  }

 private:
  template <class Line>
  void publish_at(Line& line, uint64_t kept, uint64_t said) {
    line.fence();
    line.store(VersionWord::kept(run_), kept);
    line.store(VersionWord::said(run_), said);
    line.release(VersionWord::end(run_), count_);
    published_ = count_;
  }

  uint64_t run_ = 0, start_ = 0, count_ = 0;
  uint64_t published_ = kNoEnd;  // kBegun of the version that was published last, in this run
  bool is_writing_ = false, is_in_run_ = false, is_exposed_ = false;
};

}  // namespace fsdp::internal
