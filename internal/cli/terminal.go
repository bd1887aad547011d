package cli

import (
	"io"
	"os"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"

	"golang.org/x/term"
)

// printable replaces the characters of a text that control a terminal, except for line breaks and tabs: tenants and machines write names,
// messages and logs.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' || unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, text)
}

// forTerminal returns a writer of printable text if the file is a terminal, and the file otherwise: other programs get each byte.
func forTerminal(file *os.File) io.Writer {
	if term.IsTerminal(int(file.Fd())) {
		return &printableWriter{to: file}
	}
	return file
}

// printableWriter writes printable text.
type printableWriter struct {
	to io.Writer

	mu sync.Mutex
	// part is the beginning of a character.
	part []byte
}

// Write implements io.Writer.
func (w *printableWriter) Write(data []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	text := append(w.part, data...)
	whole := len(text)
	for whole > 0 && len(text)-whole < utf8.UTFMax && !utf8.RuneStart(text[whole-1]) {
		whole--
	}
	if whole > 0 && utf8.RuneStart(text[whole-1]) && !utf8.FullRune(text[whole-1:]) {
		whole--
	} else {
		whole = len(text)
	}
	w.part = append([]byte(nil), text[whole:]...)
	if _, err := io.WriteString(w.to, printable(string(text[:whole]))); err != nil {
		return 0, err
	}
	return len(data), nil
}
