#include "transport/openssl.h"

#include <dlfcn.h>

#include <cstring>
#include <stdexcept>
#include <type_traits>

namespace hetcoll {
namespace {

constexpr unsigned char kIdentity[] = {'h', 'e', 't', 'c', 'o', 'l', 'l'};

// What openssl/ssl.h and openssl/bio.h define, the same in 1.1.1 and 3.
constexpr int kTls13 = 0x0304;
constexpr unsigned char kAes128GcmSha256[] = {0x13, 0x01};
constexpr int kCtrlMode = 33, kCtrlSessionCache = 44, kCtrlMinProtocol = 123;
constexpr long kMode = 0x01 | 0x02 | 0x10;  // partial writes, from memory that moves, and no buffers while idle
constexpr int kBioFlush = 11;

}  // namespace

const SslContext& SslContext::Get() {
  static const SslContext ssl;
  if (!ssl.why.empty()) throw std::runtime_error(ssl.why);
  return ssl;
}

void* SslContext::Session(void* ssl) const {
  const auto* tls = static_cast<const Tls*>(SSL_get_ex_data(ssl, 0));
  void* session = SSL_SESSION_new();
  SSL_SESSION_set1_master_key(session, reinterpret_cast<const unsigned char*>(tls->key_.data()), tls->key_.size());
  SSL_SESSION_set_cipher(session, SSL_CIPHER_find(ssl, kAes128GcmSha256));
  SSL_SESSION_set_protocol_version(session, kTls13);
  return session;
}

SslContext::SslContext() {
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

void SslContext::Prepare() {
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

}  // namespace hetcoll
