// OpenSSL, which is opened when the first connection is encrypted, and what all connections share of it.
#pragma once

#include <cstddef>
#include <string>

#include "transport/tls.h"

namespace hetcoll {

// Its functions, by their own names.
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

  // std::runtime_error where there is none.
  static const SslContext& Get();

 private:
  SslContext();
  void Prepare();

  // The key of a connection, in the form in which OpenSSL takes it.
  void* Session(void* ssl) const;
};

}  // namespace hetcoll
