// Package order compares booleans for sorting. The package cmp of Go has no such function.
//
// Layer: library. Allowed imports: api.
package order

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
