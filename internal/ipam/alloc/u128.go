package alloc

import (
	"encoding/binary"
	"math/big"
	"math/bits"
	"net/netip"
)

// U128 is an unsigned 128-bit number: an address of either family, or a number of addresses. netip.Addr has no addition,
// which each allocation needs, and its comparison includes the zone and the family.
type U128 struct{ Hi, Lo uint64 }

// One is the number 1.
var One = U128{Lo: 1}

// FromAddr returns the address as a number.
func FromAddr(a netip.Addr) U128 {
	if a.Is4() {
		b := a.As4()
		return U128{Lo: uint64(binary.BigEndian.Uint32(b[:]))}
	}
	b := a.As16()
	return U128{Hi: binary.BigEndian.Uint64(b[:8]), Lo: binary.BigEndian.Uint64(b[8:])}
}

// Addr returns the number as an address of the given family.
func (u U128) Addr(v6 bool) netip.Addr {
	if !v6 {
		var b [4]byte
		binary.BigEndian.PutUint32(b[:], uint32(u.Lo))
		return netip.AddrFrom4(b)
	}
	var b [16]byte
	binary.BigEndian.PutUint64(b[:8], u.Hi)
	binary.BigEndian.PutUint64(b[8:], u.Lo)
	return netip.AddrFrom16(b)
}

// Cmp compares two numbers.
func (u U128) Cmp(v U128) int {
	switch {
	case u == v:
		return 0
	case u.Hi < v.Hi || u.Hi == v.Hi && u.Lo < v.Lo:
		return -1
	default:
		return 1
	}
}

// Less reports whether u < v.
func (u U128) Less(v U128) bool { return u.Hi < v.Hi || u.Hi == v.Hi && u.Lo < v.Lo }

// Add returns u+v, modulo 2^128.
func (u U128) Add(v U128) U128 {
	lo, carry := bits.Add64(u.Lo, v.Lo, 0)
	hi, _ := bits.Add64(u.Hi, v.Hi, carry)
	return U128{hi, lo}
}

// Sub returns u-v, modulo 2^128.
func (u U128) Sub(v U128) U128 {
	lo, borrow := bits.Sub64(u.Lo, v.Lo, 0)
	hi, _ := bits.Sub64(u.Hi, v.Hi, borrow)
	return U128{hi, lo}
}

// Shl returns u shifted left by n bits, n < 128.
func (u U128) Shl(n uint) U128 {
	if n >= 64 {
		return U128{Hi: u.Lo << (n - 64)}
	}
	return U128{Hi: u.Hi<<n | u.Lo>>(64-n), Lo: u.Lo << n}
}

// Shr returns u shifted right by n bits, n < 128.
func (u U128) Shr(n uint) U128 {
	if n >= 64 {
		return U128{Lo: u.Hi >> (n - 64)}
	}
	return U128{Hi: u.Hi >> n, Lo: u.Lo>>n | u.Hi<<(64-n)}
}

// And returns the bits that are set in both numbers.
func (u U128) And(v U128) U128 { return U128{u.Hi & v.Hi, u.Lo & v.Lo} }

// IsZero reports whether u is 0.
func (u U128) IsZero() bool { return u.Hi == 0 && u.Lo == 0 }

// Big returns u as a big integer.
func (u U128) Big() *big.Int {
	b := new(big.Int).SetUint64(u.Hi)
	return b.Lsh(b, 64).Or(b, new(big.Int).SetUint64(u.Lo))
}

// String returns u in decimal.
func (u U128) String() string { return u.Big().String() }

// Float returns u as a floating-point number, for gauges.
func (u U128) Float() float64 { return float64(u.Hi)*(1<<64) + float64(u.Lo) }

// AtLeast reports whether u >= n.
func (u U128) AtLeast(n uint64) bool { return u.Hi > 0 || u.Lo >= n }
