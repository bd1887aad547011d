package testenv

import (
	"errors"
	"testing"
)

func TestRefused(t *testing.T) {
	refusal := errors.New("admission webhook: the name is too long")
	for name, test := range map[string]struct {
		answer error
		want   string
		wrong  bool
	}{
		"accepted as expected": {nil, "", false},
		"refused as expected":  {refusal, "too long", false},
		"refused":              {refusal, "", true},
		"accepted":             {nil, "too long", true},
		"another reason":       {refusal, "too short", true},
	} {
		if err := verdict(test.answer, test.want); (err != nil) != test.wrong {
			t.Errorf("%s: %v", name, err)
		}
	}
}
