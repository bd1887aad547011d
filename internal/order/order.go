// Package order orders booleans and durations. The package cmp of Go has no such functions.
//
// Layer: library. Allowed imports: api.
package order

import "time"

// TrueFirst is negative when a comes first because only a is true, positive when only b is true, and else 0.
func TrueFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}

// Sooner returns the shorter of two waits. One of 0 or less never ends, and 0 is the result for two of these.
func Sooner(a, b time.Duration) time.Duration {
	switch {
	case a <= 0:
		return max(b, 0)
	case b <= 0:
		return a
	}
	return min(a, b)
}
