// Package stored compares objects as the API server stores them.
//
// Layer: library. Allowed imports: api.
package stored

import (
	"bytes"
	"encoding/json"
)

// Equal reports whether two objects, or parts of them, are stored in the same form. Empty and missing fields are equal.
func Equal(a, b any) bool {
	x, errX := json.Marshal(a)
	y, errY := json.Marshal(b)
	return errX == nil && errY == nil && bytes.Equal(x, y)
}
