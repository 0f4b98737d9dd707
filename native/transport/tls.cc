#include "transport/tls.h"

#include <dlfcn.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <stdexcept>
#include <utility>

namespace hetcoll {
namespace {

constexpr std::size_t kGather = std::size_t{64} << 10;  // bytes that are encrypted for one call of the kernel
constexpr std::size_t kAhead = std::size_t{64} << 10;
constexpr unsigned char kIdentity[] = {'h', 'e', 't', 'c', 'o', 'l', 'l'};

// What openssl/ssl.h and openssl/bio.h define, the same in 1.1.1 and 3.
constexpr int kTls13 = 0x0304;
constexpr unsigned char kAes128GcmSha256[] = {0x13, 0x01};
constexpr int kCtrlMode = 33, kCtrlSessionCache = 44, kCtrlMinProtocol = 123;
constexpr long kMode = 0x01 | 0x02 | 0x10;  // partial writes, from memory that moves, and no buffers while idle
constexpr int kUpdateNotRequested = 0;
constexpr int kErrorWantRead = 2, kErrorWantWrite = 3, kErrorZeroReturn = 6;
constexpr int kBioFlags = 0x0f, kBioRetryRead = 0x09, kBioRetryWrite = 0x0a, kBioFlush = 11;

}  // namespace

// The library, and what all connections share.
struct SslContext {
  void* (*TLS_method)();
  void* (*SSL_CTX_new)(void*);
  long (*SSL_CTX_ctrl)(void*, int, long, void*);
  int (*SSL_CTX_set_ciphersuites)(void*, const char*);
  int (*SSL_CTX_set_num_tickets)(void*, std::size_t);
  void (*SSL_CTX_set_psk_find_session_callback)(void*, int (*)(void*, const unsigned char*, std::size_t, void**));
  void (*SSL_CTX_set_psk_use_session_callback)(void*, int (*)(void*, const void*, const unsigned char**, std::size_t*,
                                                              void**));
  SslState* (*SSL_new)(void*);
  void (*SSL_free)(SslState*);
  void (*SSL_set_bio)(SslState*, void*, void*);
  void (*SSL_set_accept_state)(SslState*);
  void (*SSL_set_connect_state)(SslState*);
  int (*SSL_read)(SslState*, void*, int);
  int (*SSL_pending)(const SslState*);
  int (*SSL_write)(SslState*, const void*, int);
  int (*SSL_get_error)(const SslState*, int);
  int (*SSL_key_update)(SslState*, int);
  int (*SSL_set_ex_data)(SslState*, int, void*);
  void* (*SSL_get_ex_data)(const void*, int);
  void* (*SSL_SESSION_new)();
  int (*SSL_SESSION_set1_master_key)(void*, const unsigned char*, std::size_t);
  int (*SSL_SESSION_set_cipher)(void*, const void*);
  int (*SSL_SESSION_set_protocol_version)(void*, int);
  const void* (*SSL_CIPHER_find)(void*, const unsigned char*);
  void* (*BIO_meth_new)(int, const char*);
  int (*BIO_meth_set_write)(void*, int (*)(void*, const char*, int));
  int (*BIO_meth_set_read)(void*, int (*)(void*, char*, int));
  int (*BIO_meth_set_ctrl)(void*, long (*)(void*, int, long, void*));
  void* (*BIO_new)(const void*);
  void (*BIO_set_data)(void*, void*);
  void* (*BIO_get_data)(void*);
  void (*BIO_set_init)(void*, int);
  void (*BIO_set_flags)(void*, int);
  void (*BIO_clear_flags)(void*, int);
  void (*ERR_clear_error)();
  const char* (*OpenSSL_version)(int);

  void* context = nullptr;
  void* method = nullptr;
  std::string why;  // there is none

  static const SslContext& Get() {
    static const SslContext ssl;
    if (!ssl.why.empty()) throw std::runtime_error(ssl.why);
    return ssl;
  }

  // The key, in the form in which OpenSSL takes it.
  void* Session(void* ssl) const {
    const auto* tls = static_cast<const Tls*>(SSL_get_ex_data(ssl, 0));
    void* session = SSL_SESSION_new();
    SSL_SESSION_set1_master_key(session, reinterpret_cast<const unsigned char*>(tls->key_.data()), tls->key_.size());
    SSL_SESSION_set_cipher(session, SSL_CIPHER_find(ssl, kAes128GcmSha256));
    SSL_SESSION_set_protocol_version(session, kTls13);
    return session;
  }

 private:
  SslContext() {
    void* library = nullptr;
    for (const char* name : {"libssl.so.3", "libssl.so.1.1", "libssl.so.4"}) {
      if ((library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) != nullptr) break;
    }
    if (library == nullptr) {
      why = "wanted OpenSSL 1.1.1 or newer, whose libssl.so.3 or libssl.so.1.1 cannot be opened";
      return;
    }
    const auto resolve = [&](auto& function, const char* name) {
      void* symbol = dlsym(library, name);
      if (symbol == nullptr && why.empty()) why = std::string("wanted OpenSSL 1.1.1 or newer: this one has no ") + name;
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
    };
#define RESOLVE(name) resolve(name, #name)
    RESOLVE(TLS_method);
    RESOLVE(SSL_CTX_new);
    RESOLVE(SSL_CTX_ctrl);
    RESOLVE(SSL_CTX_set_ciphersuites);
    RESOLVE(SSL_CTX_set_num_tickets);
    RESOLVE(SSL_CTX_set_psk_find_session_callback);
    RESOLVE(SSL_CTX_set_psk_use_session_callback);
    RESOLVE(SSL_new);
    RESOLVE(SSL_free);
    RESOLVE(SSL_set_bio);
    RESOLVE(SSL_set_accept_state);
    RESOLVE(SSL_set_connect_state);
    RESOLVE(SSL_read);
    RESOLVE(SSL_pending);
    RESOLVE(SSL_write);
    RESOLVE(SSL_get_error);
    RESOLVE(SSL_key_update);
    RESOLVE(SSL_set_ex_data);
    RESOLVE(SSL_get_ex_data);
    RESOLVE(SSL_SESSION_new);
    RESOLVE(SSL_SESSION_set1_master_key);
    RESOLVE(SSL_SESSION_set_cipher);
    RESOLVE(SSL_SESSION_set_protocol_version);
    RESOLVE(SSL_CIPHER_find);
    RESOLVE(BIO_meth_new);
    RESOLVE(BIO_meth_set_write);
    RESOLVE(BIO_meth_set_read);
    RESOLVE(BIO_meth_set_ctrl);
    RESOLVE(BIO_new);
    RESOLVE(BIO_set_data);
    RESOLVE(BIO_get_data);
    RESOLVE(BIO_set_init);
    RESOLVE(BIO_set_flags);
    RESOLVE(BIO_clear_flags);
    RESOLVE(ERR_clear_error);
    RESOLVE(OpenSSL_version);
#undef RESOLVE
    if (why.empty()) Prepare();
  }

  void Prepare() {
    context = SSL_CTX_new(TLS_method());
    method = BIO_meth_new(0, "hetcoll");
    const bool made = context != nullptr && method != nullptr &&
                      SSL_CTX_ctrl(context, kCtrlMinProtocol, kTls13, nullptr) == 1 &&
                      SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256") == 1;
    if (!made) {
      why = "this OpenSSL has no TLS 1.3 with AES-128-GCM";
      return;
    }
    SSL_CTX_ctrl(context, kCtrlMode, kMode, nullptr);
    SSL_CTX_ctrl(context, kCtrlSessionCache, 0, nullptr);
    SSL_CTX_set_num_tickets(context, 0);
    SSL_CTX_set_psk_find_session_callback(
        context, [](void* ssl, const unsigned char* identity, std::size_t n, void** session) {
          const bool ours = n == sizeof kIdentity && std::memcmp(identity, kIdentity, n) == 0;
          *session = ours ? Get().Session(ssl) : nullptr;
          return 1;
        });
    SSL_CTX_set_psk_use_session_callback(
        context, [](void* ssl, const void*, const unsigned char** identity, std::size_t* n, void** session) {
          *identity = kIdentity;
          *n = sizeof kIdentity;
          *session = Get().Session(ssl);
          return 1;
        });
    BIO_meth_set_read(method, Tls::ReadBio);
    BIO_meth_set_write(method, Tls::WriteBio);
    BIO_meth_set_ctrl(method, [](void*, int what, long, void*) { return long{what == kBioFlush}; });
  }
};

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
