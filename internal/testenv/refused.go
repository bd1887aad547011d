package testenv

import (
	"fmt"
	"strings"
	"testing"
)

// Refused checks that an API server refused a write with a message that contains want, or accepted it if want is empty.
func Refused(t *testing.T, answer error, want string) {
	t.Helper()
	if err := verdict(answer, want); err != nil {
		t.Error(err)
	}
}

func verdict(answer error, want string) error {
	switch {
	case want == "" && answer != nil:
		return fmt.Errorf("refused: %w", answer)
	case want != "" && answer == nil:
		return fmt.Errorf("accepted, want %q", want)
	case want != "" && !strings.Contains(answer.Error(), want):
		return fmt.Errorf("got %w, want %q", answer, want)
	}
	return nil
}
