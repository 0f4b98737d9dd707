// What the one-shot kernels take, shared with the engine that launches them. Addresses are the launching device's.
#pragma once

namespace hetcoll {

constexpr unsigned kOneshotRanks = 16;

// The ranks of one host that reduce small messages among themselves. An area is 2 * `words` words, zeroed at first, in
// memory that its writer and its readers have mapped: one of each rank that all others read, or one for each of these.
struct Oneshot {
  void* dst;        // count elements; may be src
  const void* src;  // count elements, at any address
  unsigned long long count;
  const unsigned long long* from[kOneshotRanks];  // where the words of each other rank are read
  unsigned long long* to[kOneshotRanks];          // the `copies` areas that take this rank's
  unsigned* state;   // two words of this device's memory, zeroed at first: calls made, blocks done in this call
  unsigned* abort;   // a word of mapped memory: when it is not 0, the kernel gives up; see waits.h
  int rank, size;    // 2 <= size <= kOneshotRanks
  unsigned divisor;  // of sums; 1: none
  unsigned words;    // in a half of an area: at least count * itemsize / 4, rounded up to whole elements
  unsigned rounds;   // 1: after each operand; 0: once
  unsigned copies;
};
static_assert(sizeof(Oneshot) == 24 + 16 * kOneshotRanks + 40,
              "hetcoll/vendors/devices/kernels/table.py has the same layout");

// What the exchange kernels take (exchange.h). Every rank has a ring of `slots` slots for each block, and their words,
// zeroed at first, in memory that all devices have mapped.
struct Exchange {
  void* dst;        // count elements, or size * count; may be src, and where one is a part of the other, this rank's
  const void* src;  // likewise, at any address; a rank that takes nothing has no dst, one that gives nothing no src
  unsigned long long count;
  char* rings[kOneshotRanks];
  unsigned long long* words[kOneshotRanks];
  unsigned long long* state;  // a word for each block, in this device's memory, zeroed at first: its messages so far
  unsigned* abort;            // as above
  int rank, size;
  unsigned divisor;
  unsigned slots;        // at least 4
  unsigned slot_bytes;   // from one slot to the next
  unsigned chunk_bytes;  // those of all peers, where src is cut by rank, fit a slot; of the size of the message alone
  unsigned short first, sources;  // this rank takes the data of so many ranks from `first` on, perhaps its own
  unsigned char gives;            // whether a peer takes this rank's
  unsigned char cut;              // whether src has a part for each rank, and not one for all
  unsigned char two_shot;         // whether each rank reduces a part for all
  unsigned char rounds;           // as above
};
static_assert(sizeof(Exchange) == 24 + 16 * kOneshotRanks + 48,
              "hetcoll/vendors/devices/kernels/table.py has the same layout");

constexpr unsigned kMessages = 2 * (kOneshotRanks - 1);  // of a kernel: one each way with every other rank

// One message, in the ring of its direction between two ranks of a host (messages.h).
struct Message {
  void* at;  // nbytes, at any address: read by the sender, written by the receiver
  unsigned long long nbytes;
  char* ring;                  // in memory that both devices have mapped, zeroed at first
  unsigned long long* state;   // of this end of the ring, in this device's memory, zeroed at first
  unsigned first, blocks;      // whose blocks it has
  unsigned chunk;              // bytes that a block takes at a time: of nbytes alone
  unsigned char sends, words;  // 1: it is sent, by words that carry their number
  unsigned short peer;         // the other rank, by its place on the host
};
struct Messages {
  Message message[kMessages];
  unsigned* abort;  // as above
  unsigned count, unused;
};
static_assert(sizeof(Messages) == 48 * kMessages + 16, "hetcoll/vendors/devices/kernels/table.py has the same layout");

constexpr unsigned kPieces = 128;  // of a launch: what it takes is 4 KiB at most

// What the kernel of copies takes (pieces.h).
struct Piece {
  char* to;
  const char* from;
  unsigned long long nbytes;
};
struct Pieces {
  Piece piece[kPieces];
  unsigned count;
  unsigned blocks;  // of a piece; those of the launch are a multiple
};
static_assert(sizeof(Pieces) == 24 * kPieces + 8, "native/gpu/copier.cc has the same layout");

// What the kernels of tokens take (tokens.h). A rank sends each other one, or offers to several, a block: the ids of
// `most` tokens, as 32 bits, how many tokens it has, and rows of `room` of them from `first` on behind that. Lists are
// in this device's memory, by rank but for `to`. `parts` and `came` have room for two rounds of rows, where there are
// several.
struct Tokens {
  const char* x;                  // [tokens, hidden]
  const char* ids;                // [tokens, columns] of id_bytes each; what is no expert is none
  int* own;                       // [most, columns]: this rank's ids, and -1
  char* const* to;                // the blocks that this rank fills
  const unsigned long long* via;  // by which of them its tokens reach a rank
  char* const* from;              // those for this rank
  int* places;                    // [size, most, columns]: which row of `received`; -1: none
  char* counts;                   // [experts] of id_bytes each
  unsigned* longest;              // how many tokens the rank has that has most; null: nobody asks
  unsigned* sent;                 // [size, most]: at which row for each rank a token of this one is; null: at its own
  unsigned* taken;                // the same of each rank's tokens that came
  unsigned long long* late;       // bytes for each rank, in memory of the host: what this kernel numbers
  char* received;                 // rows by expert: what came, at a multiple of 16; or what was made of it
  char* const* weights;           // [most, columns] of float
  char* const* parts;             // rows: what this rank's experts make of each rank's tokens
  char* const* came;              // rows: what each rank's made of this one's
  char* result;                   // [tokens, hidden]
  unsigned* state;                // rounds of dispatches so far, and blocks of threads that are done with this one
  unsigned long long odd;         // bytes behind a block to that of odd rounds
  unsigned long long packed, stride;                                   // bytes from row to row of blocks, and of parts
  unsigned long long hidden;                                           // elements
  unsigned tokens, most, columns, size, rank, experts, id_bytes, fp8;  // experts: of a rank
  unsigned dense;  // whether an expert's rows follow those of the one before it, and not size * most for each
  unsigned blocks, first, room;  // in `to`; of this round
  unsigned incoming;             // whether tokens are numbered that came, and not those that go
  unsigned pad;
};
static_assert(sizeof(Tokens) == 232, "hetcoll/vendors/devices/kernels/table.py has the same layout");

constexpr unsigned kFoldLanes = 16;

// What is known of some elements (folds.h): a hash of their bits; how many are not finite, and the first of them, or
// ~0; of sums the largest magnitude. A lane has every 16th 16 bytes: their fold, and of sums their magnitudes'. What is
// a double is here by its bits.
struct Record {
  unsigned long long hash, odd, first, most;
  unsigned long long lane[kFoldLanes], size[kFoldLanes];
};
static_assert(sizeof(Record) == 288, "hetcoll/vendors/devices/kernels/table.py has the same size");

// What the kernels that fold take. Part p, from element offsets[p] on to before offsets[p + 1], has a record at to[p].
struct Fold {
  Record* to;
  const char* from;                   // at any address
  const unsigned long long* offsets;  // in memory that host and device have mapped
  Record* partial;                    // one a block, where a part has several
  unsigned* tickets;                  // one a part, 0 between launches
  unsigned op, blocks;                // as kMoved of folds.h says; of a part
};
static_assert(sizeof(Fold) == 48, "hetcoll/vendors/devices/kernels/table.py has the same layout");

// What a rank finds in the replays of a call that a graph captured, in memory that host and device have mapped. A
// replay is said last of all that is known of it: the first one whose input was not finite, and the first one that was
// wrong.
struct Findings {
  unsigned long long replays;
  unsigned long long odd_replay, odd, first;
  unsigned long long wrong_replay, what, where, got, wanted;  // as Wrong of checks.h says
};
static_assert(sizeof(Findings) == 72, "hetcoll/vendors/devices/kernels/table.py has the same layout");

// What the kernels that compare take.
struct Comparison {
  Findings* to;
  const Record* given;                // rank r's at given[r * stride]; in all-reduces that of its result follows
  const Record* own;                  // of what this rank gives, by part
  const Record* made;                 // of the result, by part
  const unsigned long long* offsets;  // of the parts of `own`
  double slope, floor, most;          // of sums: see Fold of runtime/checksums.py
  unsigned op, divisor;               // as Fold has it; of sums
  unsigned rank, size, stride, own_parts, parts;
  unsigned root;   // who gave the only part of what was moved; `size`: rank r gave part r
  unsigned same;   // whether all ranks are to have one result
  unsigned whole;  // whether elements are integers, whose sums are checked only where none can wrap
};
static_assert(sizeof(Comparison) == 104, "hetcoll/vendors/devices/kernels/table.py has the same layout");

}  // namespace hetcoll
