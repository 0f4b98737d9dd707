#include "transport/tls.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <stdexcept>
#include <utility>

#include "transport/openssl.h"

namespace hetcoll {
namespace {

constexpr std::size_t kGather = std::size_t{64} << 10;  // bytes that are encrypted for one call of the kernel
constexpr std::size_t kAhead = std::size_t{64} << 10;

// What openssl/ssl.h and openssl/bio.h define, the same in 1.1.1 and 3.
constexpr int kUpdateNotRequested = 0;
constexpr int kErrorWantRead = 2, kErrorWantWrite = 3, kErrorZeroReturn = 6;
constexpr int kBioFlags = 0x0f, kBioRetryRead = 0x09, kBioRetryWrite = 0x0a;

}  // namespace

namespace {

// Sessions between their handshake and whoever takes the socket over.
struct Handed {
  std::mutex mutex;
  std::map<std::uint64_t, std::shared_ptr<Tls>> by_cookie;
};

Handed& AllHanded() {
  static Handed handed;
  return handed;
}

// The kernel's number of a socket, which no other one ever has (socket(7), SO_COOKIE).
std::uint64_t Cookie(int fd) {
  std::uint64_t cookie = 0;
  socklen_t size = sizeof cookie;
  return getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &size) == 0 ? cookie : 0;
}

}  // namespace

Tls::Tls(int fd, const TlsKey& key, bool server, bool ahead, std::uint64_t rekey)
    : fd_(fd), ahead_(ahead), key_(key), ssl_(nullptr, SslContext::Get().SSL_free), rekey_(rekey) {
  const SslContext& api = SslContext::Get();
  ssl_.reset(api.SSL_new(api.context));
  void* bio = ssl_ == nullptr ? nullptr : api.BIO_new(api.method);
  if (bio == nullptr) throw std::runtime_error("OpenSSL has no memory for a connection");
  api.BIO_set_data(bio, this);
  api.BIO_set_init(bio, 1);
  api.SSL_set_bio(ssl_.get(), bio, bio);
  api.SSL_set_ex_data(ssl_.get(), 0, this);
  (server ? api.SSL_set_accept_state : api.SSL_set_connect_state)(ssl_.get());
}

Tls::~Tls() = default;

void Tls::Hand(int fd, std::shared_ptr<Tls> tls) {
  {
    std::lock_guard lock(tls->mutex_);
    tls->fd_ = fd;
    tls->ahead_ = true;
  }
  Handed& handed = AllHanded();
  std::lock_guard lock(handed.mutex);
  handed.by_cookie[Cookie(fd)] = std::move(tls);
}

std::shared_ptr<Tls> Tls::Claim(int fd) {
  Handed& handed = AllHanded();
  std::lock_guard lock(handed.mutex);
  if (handed.by_cookie.empty()) return nullptr;
  const auto found = handed.by_cookie.extract(Cookie(fd));
  return found.empty() ? nullptr : found.mapped();
}

std::string Tls::Library() {
  const std::string version = SslContext::Get().OpenSSL_version(0);  // its date follows
  return version.substr(0, version.find(' ', version.find(' ') + 1));
}

ssize_t Tls::Send(std::span<const iovec> pieces) {
  std::lock_guard lock(mutex_);
  std::size_t total = 0;
  for (const iovec& piece : pieces) total += piece.iov_len;
  Flush();
  if (sealed_.empty() && total > 0 && sent_ == out_.size()) {
    out_.reserve(std::min(total, kGather) + 2 * kRecord);
    for (std::size_t at = 0; at < total && out_.size() < kGather; at += sealed_.back().plain) {
      if (Seal(pieces, at)) continue;
      if (!sealed_.empty()) break;
      if (Failed() == 0) errno = EPIPE;
      return -1;
    }
    Flush();
  }
  std::size_t n = 0;
  while (!sealed_.empty() && sealed_.front().end <= sent_ && n + sealed_.front().plain <= total) {
    n += sealed_.front().plain;
    sealed_.erase(sealed_.begin());
  }
  if (sent_ == out_.size()) {  // idle connections hold no memory
    for (Sealed& rest : sealed_) rest.end = 0;
    out_ = {};
    sent_ = 0;
  }
  if (n > 0 || total == 0) return static_cast<ssize_t>(n);
  errno = errno_ != 0 ? errno_ : EAGAIN;
  return -1;
}

// Encrypts the next record, of what is behind the first `skip` bytes; false: not now, or never.
bool Tls::Seal(std::span<const iovec> pieces, std::size_t skip) {
  std::array<std::byte, kRecord> joined;
  const std::byte* from = nullptr;
  std::size_t n = 0;
  for (const iovec& piece : pieces) {
    const std::size_t past = std::min(skip, piece.iov_len);
    skip -= past;
    const std::size_t part = std::min(piece.iov_len - past, kRecord - n);
    if (part == 0) continue;
    const std::byte* data = static_cast<const std::byte*>(piece.iov_base) + past;
    if (n == 0 && (part == kRecord || &piece == &pieces.back())) {
      from = data;
    } else {
      std::memcpy(joined.data() + n, data, part);
      from = joined.data();
    }
    n += part;
  }
  const SslContext& api = SslContext::Get();
  api.ERR_clear_error();
  errno_ = 0;
  const int sealed = api.SSL_write(ssl_.get(), from, static_cast<int>(n));
  if (sealed <= 0) {
    failed_ = sealed;
    return false;
  }
  proven_ = true;
  if (std::exchange(spoil_, false)) out_.back() ^= std::byte{0x10};
  if (++records_ % rekey_ == 0) api.SSL_key_update(ssl_.get(), kUpdateNotRequested);  // before the next one
  sealed_.push_back({static_cast<std::size_t>(sealed), out_.size()});
  return true;
}

// Sends what is encrypted, as much as the kernel takes.
void Tls::Flush() {
  errno_ = 0;
  while (sent_ < out_.size()) {
    const ssize_t n = send(fd_, out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0) {
      sent_ += static_cast<std::size_t>(n);
    } else if (errno != EINTR) {
      errno_ = errno == EPIPE && broken_ != 0 ? broken_ : errno;  // why that is so was said to a receive
      return;
    }
  }
}

ssize_t Tls::Receive(std::byte* to, std::size_t n) {
  std::lock_guard lock(mutex_);
  const SslContext& api = SslContext::Get();
  api.ERR_clear_error();
  errno_ = 0;
  std::size_t came = 0;
  int got = 1;
  while (came < n && got > 0 && (came == 0 || Holds())) {
    got = api.SSL_read(ssl_.get(), to + came, static_cast<int>(std::min(n - came, kRecord)));
    if (got > 0) came += static_cast<std::size_t>(got);
  }
  if (came > 0) {  // what kept the rest from coming is said next time
    proven_ = true;
    return static_cast<ssize_t>(came);
  }
  failed_ = got;
  const ssize_t failed = Failed();
  const int why = errno;
  if (read_ == ahead_bytes_) in_.reset();
  errno = why;
  return failed;
}

// Whether something is here that the socket does not tell of.
bool Tls::Holds() const { return read_ < ahead_bytes_ || SslContext::Get().SSL_pending(ssl_.get()) > 0; }

// Why OpenSSL did nothing: 0 at the end of the stream, else -1 and errno. What it has to say to the peer goes first.
ssize_t Tls::Failed() {
  const SslContext& api = SslContext::Get();
  const int error = api.SSL_get_error(ssl_.get(), failed_);
  const int read_error = errno_;
  if (sealed_.empty()) Flush();  // what was sealed goes when `Send` can say so
  if (over_ || error == kErrorZeroReturn) return 0;
  const bool later = error == kErrorWantRead || error == kErrorWantWrite;
  if (read_error != 0 && read_error != EAGAIN) {
    errno = read_error;
  } else if (later) {
    errno = errno_ != 0 ? errno_ : EAGAIN;
  } else {
    errno = proven_ ? EBADMSG : EKEYREJECTED;
  }
  return -1;
}

// ---- What OpenSSL calls ----

int Tls::WriteBio(void* bio, const char* from, int n) {
  auto& out = static_cast<Tls*>(SslContext::Get().BIO_get_data(bio))->out_;
  const auto* bytes = reinterpret_cast<const std::byte*>(from);
  out.insert(out.end(), bytes, bytes + n);
  return n;
}

int Tls::ReadBio(void* bio, char* to, int n) {
  const SslContext& api = SslContext::Get();
  auto* tls = static_cast<Tls*>(api.BIO_get_data(bio));
  api.BIO_clear_flags(bio, kBioFlags);
  const ssize_t got = tls->Fetch(reinterpret_cast<std::byte*>(to), static_cast<std::size_t>(n));
  if (got >= 0) {
    tls->over_ |= got == 0;
    return static_cast<int>(got);
  }
  tls->errno_ = errno;
  if (errno == EAGAIN) api.BIO_set_flags(bio, kBioRetryRead);
  return -1;
}

// As recv(2).
ssize_t Tls::Fetch(std::byte* to, std::size_t n) {
  const auto receive = [this](std::byte* into, std::size_t most) -> ssize_t {
    while (broken_ == 0) {
      const ssize_t got = recv(fd_, into, most, MSG_DONTWAIT);
      if (got >= 0 || errno == EAGAIN) return got;
      if (errno != EINTR) broken_ = errno;  // the kernel says it once
    }
    errno = broken_;
    return -1;
  };
  if (read_ == ahead_bytes_) {
    if (!ahead_) return receive(to, n);
    if (in_ == nullptr) in_ = std::make_unique_for_overwrite<std::byte[]>(kAhead);
    const ssize_t got = receive(in_.get(), kAhead);
    if (got <= 0) return got;
    read_ = 0;
    ahead_bytes_ = static_cast<std::size_t>(got);
  }
  const std::size_t part = std::min(n, ahead_bytes_ - read_);
  std::memcpy(to, in_.get() + read_, part);
  read_ += part;
  return static_cast<ssize_t>(part);
}

}  // namespace hetcoll
