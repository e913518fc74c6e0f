"""Cryptographic primitives, from the package `cryptography`: key agreement, signatures, masks, encrypted messages."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from coterie.core.key import Key

SECRET = 32  # bytes of a seed, of a secret key and of a public key
TAG = 16  # bytes by which an encrypted message is longer
SIGNATURE = 64  # bytes

Entropy = Callable[[int], bytes]  # returns that many random bytes; `os.urandom` except in simulations


class Pair:
    """An X25519 key pair.

    Args:
        secret: The secret key: `SECRET` random bytes.
    """

    def __init__(self, secret: bytes) -> None:
        self.secret = secret
        self._key = X25519PrivateKey.from_private_bytes(secret)
        self.public = self._key.public_key().public_bytes_raw()
        self._common: dict[bytes, bytes] = {}  # by public key: the slow part of an agreement, whatever its purpose

    def agree(self, public: bytes, purpose: bytes) -> bytes:
        """Return the secret that this key pair shares with the owner of another one, a different one per purpose.

        Args:
            public: The other's public key.
            purpose: What the secret is used for.

        Raises:
            ValueError: No agreement with this key is possible.

        Example:
            >>> a, b = Pair(bytes(32)), Pair(bytes(range(32)))
            >>> a.agree(b.public, b"masks") == b.agree(a.public, b"masks") != b.agree(a.public, b"shares")
            True
        """
        if public not in self._common:
            self._common[public] = self._key.exchange(X25519PublicKey.from_public_bytes(public))
        info = b"coterie secure sum: " + purpose
        return HKDF(hashes.SHA256(), SECRET, salt=None, info=info).derive(self._common[public])


class Identity:
    """An Ed25519 key pair by which others know a party from session to session.

    Args:
        secret: The secret key: `SECRET` random bytes.
    """

    def __init__(self, secret: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        self.public = self._key.public_key().public_bytes_raw()

    def sign(self, text: bytes) -> bytes:
        """Return the signature of a text.

        Args:
            text: What is signed.

        Example:
            >>> one = Identity(bytes(32))
            >>> is_signed(one.public, b"a list", one.sign(b"a list")), is_signed(one.public, b"b", one.sign(b"a list"))
            (True, False)
        """
        return self._key.sign(text)


@lru_cache(maxsize=1024)  # in a simulation all clients of a session check the same signatures in one process
def is_signed(public: bytes, text: bytes, signature: bytes) -> bool:
    """Return whether the owner of an identity has signed a text.

    Args:
        public: The public key of the identity.
        text: What was to be signed.
        signature: The signature.
    """
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
    except (InvalidSignature, ValueError):  # the second where the bytes are no key
        return False
    return True


def usable(public: bytes) -> bool:
    """Return whether a key agreement with this public key is possible; some byte strings are not valid keys.

    Args:
        public: The public key.

    Example:
        >>> usable(Pair(bytes(32)).public), usable(bytes(32))
        (True, False)
    """
    try:
        Pair(os.urandom(SECRET)).agree(public, b"trial")
    except ValueError:
        return False
    return True


def mask(seed: bytes, length: int) -> np.ndarray:
    """Return numbers below 2⁶⁴ that look random to everybody who does not know the seed.

    Args:
        seed: `SECRET` bytes.
        length: How many numbers to return.

    Example:
        >>> mask(bytes(32), 3).dtype, bool((mask(bytes(32), 3) == mask(bytes(32), 5)[:3]).all())
        (dtype('uint64'), True)
    """
    return np.frombuffer(_stream(seed)(8 * length), dtype="<u8")


def seal(key: bytes, sender: int, receiver: int, text: bytes) -> bytes:
    """Encrypt and authenticate a message that one client sends to another through the server.

    Args:
        key: The key that the two clients share.
        sender: Number of the client that sends the message.
        receiver: Number of the client that the message is for.
        text: The message.
    """
    return ChaCha20Poly1305(key).encrypt(_nonce(sender), text, _address(sender, receiver))


def unseal(key: bytes, sender: int, receiver: int, sealed: bytes) -> bytes:
    """Decrypt a message that `seal` has encrypted; raise an error if it has been changed.

    Args:
        key: The key that the two clients share.
        sender: Number of the client that sent the message.
        receiver: Number of the client that the message is for.
        sealed: The encrypted message.

    Raises:
        cryptography.exceptions.InvalidTag: The message, its sender or its receiver has been changed.
    """
    return ChaCha20Poly1305(key).decrypt(_nonce(sender), sealed, _address(sender, receiver))


def simulated(key: Key) -> Entropy:
    """Return a source of bytes that are computed from a key, so that a simulation is reproducible.

    They protect nothing, because the key is not secret.

    Args:
        key: The key.
    """
    return _stream(hashlib.blake2b(repr(key.path).encode(), digest_size=SECRET, person=b"coterie secure").digest())


def _stream(seed: bytes) -> Entropy:
    """Return a ChaCha20 stream. Each seed is used for one stream only, so the nonce need not change."""
    encryptor = Cipher(ChaCha20(seed, nonce=bytes(16)), mode=None).encryptor()
    return lambda length: encryptor.update(bytes(length))


def _nonce(sender: int) -> bytes:
    """Return the nonce: with the key that two clients share in a session, each sends the other one message."""
    return sender.to_bytes(12, "big")


def _address(sender: int, receiver: int) -> bytes:
    return sender.to_bytes(8, "big") + receiver.to_bytes(8, "big")
