// Messages between GPUs of one host that are too small for copy engines, all that a call has in one kernel a rank.
//
// Each direction between two ranks has a ring in memory that both devices have mapped: for each block some slots, in
// which its chunks follow each other, numbered from call to call. Block b of the sender fills what block b of the
// receiver empties, and waits for nothing else, so no message waits for another one of its kernel. Small messages are
// words: 4 bytes of data and the chunk's number, which arrive together (oneshot.h). Of larger ones a block copies a
// chunk and then says in a word that it is there. The two kinds have slots of their own, since data may look like
// any word. A receiver says which chunks it has taken; a sender that is as many ahead as there are slots waits for
// that. A message has no more chunks a block than there are slots: an empty ring takes all of it, receiver or not.
#pragma once

#include "devices/kernels/arguments.h"
#include "devices/kernels/rings.h"

namespace hetcoll {

constexpr unsigned kMessageBlocks = 64;                 // at most, for one message: a chunk takes a block 5 us
constexpr unsigned kRingSlots = 4;                      // of a block, of either kind
constexpr unsigned kWordSlot = 4096, kPackSlot = 8192;  // bytes; words hold half as many
constexpr unsigned kLineBytes = 64;                     // from one counter to the next
constexpr unsigned kRingSweep = 1u << 16;               // a slot's words are all written once in so many times

// What a block has of a ring: its slots of one kind, and their counters.
struct Lane {
  HETCOLL_DEVICE Lane Of(const Message& m, unsigned block) {
    constexpr U64 kWordBytes = U64{kMessageBlocks} * kRingSlots * kWordSlot;
    constexpr U64 kPackBytes = U64{kMessageBlocks} * kRingSlots * kPackSlot;
    const unsigned slot = m.words ? kWordSlot : kPackSlot, row = (m.words ? 0 : 2 * kMessageBlocks) + block;
    char* counters = m.ring + kWordBytes + kPackBytes;
    return {m.ring + (m.words ? 0 : kWordBytes) + U64{block} * kRingSlots * slot, slot,
            reinterpret_cast<U64*>(counters + U64{row} * kLineBytes),
            reinterpret_cast<U64*>(counters + U64{row + kMessageBlocks} * kLineBytes),
            m.state + 2 * ((m.words ? 0 : kMessageBlocks) + block)};
  }
  HETCOLL_DEVICE char* At(const Lane& lane, U64 number) { return lane.slots + number % kRingSlots * lane.slot; }

  char* slots;
  unsigned slot;
  U64* taken;  // the last chunk that the receiver has read
  U64* ready;  // the last one that the sender has put there; of packs only
  U64* state;  // this end's: chunks so far, and, of a sender, what `taken` was when it was last looked at
};

// Waits until the word has reached `number`, one thread for the block; the word. Less: the call was aborted.
HETCOLL_DEVICE U64 AwaitForBlock(const Messages& x, const Message& m, const U64* word, U64 number) {
  HETCOLL_SHARED U64 found;
  if (ThreadInBlock() == 0) found = AwaitWord(x.abort, m.peer, word, number) ? LoadRelaxed(word) : 0;
  Barrier();
  const U64 value = found;
  Barrier();  // before `found` is used again
  return value;
}

// The 8 bytes at 8 * i of n at any address; what is past the end is 0.
HETCOLL_DEVICE U64 ReadEight(const char* from, U64 n, U64 i) {
  const char* at = from + 8 * i;
  if (8 * i + 8 <= n && reinterpret_cast<U64>(at) % 8 == 0) return Load<U64, 8>(at);
  U64 value = 0;
  for (unsigned b = 0; b < 8 && 8 * i + b < n; ++b) value |= U64{Load<unsigned char, 1>(at + b)} << (8 * b);
  return value;
}
HETCOLL_DEVICE void WriteEight(char* to, U64 n, U64 i, U64 value) {
  char* at = to + 8 * i;
  if (8 * i + 8 <= n && reinterpret_cast<U64>(at) % 8 == 0) return Store<8>(at, value);
  for (unsigned b = 0; b < 8 && 8 * i + b < n; ++b) Store<1>(at + b, static_cast<unsigned char>(value >> (8 * b)));
}

// n bytes as words with the low half of the number. Numbers come back after 2^32 chunks; until then no slot keeps a
// word of that age, since all of its words are written now and then.
HETCOLL_DEVICE void PutWords(char* slot, const char* from, U64 n, U64 number) {
  const U64 stamp = number << 32, items = (n + 7) / 8;
  for (U64 i = ThreadInBlock(); i < items; i += BlockSize()) {
    const U64 data = ReadEight(from, n, i);
    StoreRelaxedPair(slot + 16 * i, stamp | (data & 0xffffffffu), stamp | data >> 32);
  }
  if (number / kRingSlots % kRingSweep != 0) return;
  for (U64 i = items + ThreadInBlock(); i < kWordSlot / 16; i += BlockSize()) {
    StoreRelaxedPair(slot + 16 * i, stamp, stamp);
  }
}

// Takes them. Where the call is aborted, what is in `to` is undefined.
HETCOLL_DEVICE void TakeWords(unsigned* abort, int peer, const char* slot, char* to, U64 n, U64 number) {
  const U64 items = (n + 7) / 8, low = number & 0xffffffffu;
  for (U64 i = ThreadInBlock(); i < items; i += BlockSize()) {
    U64 word[2];
    LoadRelaxedPair(slot + 16 * i, word);
    for (unsigned looks = 1; word[0] >> 32 != low || word[1] >> 32 != low; ++looks) {
      if (GivesUp(abort, peer, looks)) return;
      Relax();
      LoadRelaxedPair(slot + 16 * i, word);
    }
    WriteEight(to, n, i, (word[0] & 0xffffffffu) | word[1] << 32);
  }
}

using Byte = unsigned char;

HETCOLL_DEVICE void Send(const Messages& x, const Message& m, unsigned block) {
  const Lane lane = Lane::Of(m, block);
  const auto* from = static_cast<const char*>(m.at);
  U64 number = lane.state[0], taken = lane.state[1];
  for (U64 begin = U64{block} * m.chunk; begin < m.nbytes; begin += U64{m.blocks} * m.chunk) {
    const U64 n = m.nbytes - begin < m.chunk ? m.nbytes - begin : m.chunk;
    if (++number > taken + kRingSlots) {
      taken = AwaitForBlock(x, m, lane.taken, number - kRingSlots);
      if (number > taken + kRingSlots) return;
    }
    char* slot = Lane::At(lane, number);
    if (m.words) {
      PutWords(slot, from + begin, n, number);
      continue;
    }
    for (U64 i = ThreadInBlock(); i < (n + kPack - 1) / kPack; i += BlockSize()) {
      Store<kPack>(slot + i * kPack, ReadPack<Byte>(from, begin, begin + n, i));
    }
    Barrier();
    if (LastInBlock()) PublishRelease(lane.ready, number);
  }
  Barrier();  // all have read the state
  if (!LastInBlock()) return;
  lane.state[0] = number;
  lane.state[1] = taken;
}

HETCOLL_DEVICE void Receive(const Messages& x, const Message& m, unsigned block) {
  const Lane lane = Lane::Of(m, block);
  auto* to = static_cast<char*>(m.at);
  U64 number = lane.state[0];
  for (U64 begin = U64{block} * m.chunk; begin < m.nbytes; begin += U64{m.blocks} * m.chunk) {
    const U64 n = m.nbytes - begin < m.chunk ? m.nbytes - begin : m.chunk;
    const char* slot = Lane::At(lane, ++number);
    if (m.words) {
      TakeWords(x.abort, m.peer, slot, to + begin, n, number);
    } else {
      if (AwaitForBlock(x, m, lane.ready, number) < number) return;
      for (U64 i = ThreadInBlock(); i < (n + kPack - 1) / kPack; i += BlockSize()) {
        WritePack<Byte>(to, begin, begin + n, i, LoadPeers<Byte>(slot + i * kPack));
      }
    }
    Barrier();
    // Not after what was written to `to`, which is nobody else's, but after all loads: what they gave has been used.
    if (LastInBlock()) StoreRelaxed(lane.taken, number);
  }
  Barrier();
  if (LastInBlock()) lane.state[0] = number;
}

}  // namespace hetcoll

HETCOLL_KERNEL messages(HETCOLL_CONSTANT hetcoll::Messages arguments) {
  for (unsigned k = 0; k < arguments.count; ++k) {
    const hetcoll::Message& m = arguments.message[k];
    const unsigned block = hetcoll::BlockIndex() - m.first;
    if (block >= m.blocks) continue;
    if (m.sends) {
      hetcoll::Send(arguments, m, block);
    } else {
      hetcoll::Receive(arguments, m, block);
    }
  }
}
HETCOLL_ENTRY(messages)
