"""Whatever strangers, members and people's files may say: every parser and every listener, under any bytes.

`targets` says what is fuzzed. The tests draw bytes by hypothesis; `make fuzz` goes on where new code is reached, with
atheris. `strangers` are connections that mean harm, as many as one asks for.
"""
