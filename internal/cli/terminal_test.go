package cli

import (
	"bytes"
	"testing"
)

// TestPrintableWriter: no byte sequence of a tenant controls the terminal, however it is divided into writes.
func TestPrintableWriter(t *testing.T) {
	for in, want := range map[string]string{
		"a\tb\nc …✓ ä\n":     "a\tb\nc …✓ ä\n",
		"\x1b[2Kforged\r":    " [2Kforged ",
		"\x1b]52;c;aGk=\x07": " ]52;c;aGk= ",
		"a\u009b2Kb":         "a 2Kb",               // CSI in one character
		"a\u202eb\u2066c":    "a b c",               // the direction of text
		"\xff\xc3(\x9b":      "\ufffd\ufffd(\ufffd", // no UTF-8
	} {
		for size := 1; size <= len(in); size++ {
			var out bytes.Buffer
			w := &printableWriter{to: &out}
			for rest := []byte(in); len(rest) > 0; {
				part := rest[:min(size, len(rest))]
				if n, err := w.Write(part); n != len(part) || err != nil {
					t.Fatal(n, err)
				}
				rest = rest[len(part):]
			}
			if out.String() != want {
				t.Errorf("%q in parts of %d bytes: %q, want %q", in, size, out.String(), want)
			}
		}
	}
}
