// TLS 1.3 (RFC 8446) over a connected socket, for HETCOLL_TLS: both ends prove the job's key, as a pre-shared key with
// an ephemeral Diffie-Hellman exchange (2.2 there), so there are no certificates, and who learns the key later reads
// nothing of what went by.
//
// OpenSSL does the cryptography, and is opened at run time. It sees no socket: records go through memory here, several
// to a call of the kernel.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace hetcoll {

struct SslState;  // OpenSSL's
struct SslContext;

using TlsKey = std::array<std::byte, 32>;

// One connection. The handshake is done by whatever is called first, and goes on with every call. Thread-safe.
class Tls {
 public:
  static constexpr std::size_t kRecord = std::size_t{16} << 10;      // the most bytes that are encrypted as one
  static constexpr std::uint64_t kRecords = std::uint64_t{1} << 23;  // under one key: RFC 8446, 5.5, allows 2^24.5

  // The socket must be non-blocking, and stays its owner's. `ahead`: what the kernel has is read before it is asked
  // for, so that the socket may not be readable while this has data. After `rekey` records comes a new key. Throws
  // std::runtime_error where there is no OpenSSL.
  Tls(int fd, const TlsKey& key, bool server, bool ahead, std::uint64_t rekey = kRecords);
  ~Tls();
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  // As sendmsg(2): how many bytes of the pieces the kernel has, encrypted, to the last. Who got less than it offered,
  // or EAGAIN, must offer the bytes that follow next, since some of these may have been encrypted.
  ssize_t Send(std::span<const iovec> pieces);
  // As recv(2). EBADMSG: what came was changed on the way; EKEYREJECTED: the other end does not have the key. Where
  // fewer than n bytes came, the socket is readable when there are more.
  ssize_t Receive(std::byte* to, std::size_t n);

  // Of the socket that it is now for: the one that took over the descriptor. Reads ahead from here on.
  static void Hand(int fd, std::shared_ptr<Tls> tls);
  static std::shared_ptr<Tls> Claim(int fd);  // null: it is not encrypted

  void SpoilNext() { spoil_ = true; }  // for HETCOLL_FAULT and tests: a bit of what is sent next

  // "OpenSSL 3.0.19"; throws as the constructor.
  static std::string Library();

 private:
  struct Sealed {  // a record
    std::size_t plain;
    std::size_t end;  // in out_
  };

  bool Seal(std::span<const iovec> pieces, std::size_t skip);
  void Flush();
  bool Holds() const;
  ssize_t Failed();
  ssize_t Fetch(std::byte* to, std::size_t n);
  static int ReadBio(void* bio, char* to, int n);
  static int WriteBio(void* bio, const char* from, int n);

  std::mutex mutex_;
  int fd_;
  bool ahead_;
  bool spoil_ = false;
  bool over_ = false;    // the peer ended it
  bool proven_ = false;  // that it has the key
  int errno_ = 0;        // of the last read or write of the socket, if it failed
  int broken_ = 0;       // why nothing more comes
  int failed_ = 0;       // what OpenSSL returned when it did nothing
  const TlsKey key_;
  std::unique_ptr<SslState, void (*)(SslState*)> ssl_;
  std::vector<std::byte> out_;       // encrypted, not all of it sent
  std::size_t sent_ = 0;             // of it
  std::vector<Sealed> sealed_;       // in it, not told of
  std::unique_ptr<std::byte[]> in_;  // read ahead
  std::size_t ahead_bytes_ = 0;      // that it has
  std::size_t read_ = 0;             // of them
  std::uint64_t records_ = 0;        // sent
  const std::uint64_t rekey_;
  friend struct SslContext;
};

}  // namespace hetcoll
