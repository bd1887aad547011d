package version

import (
	"strings"
	"testing"
)

func TestCheckWriter(t *testing.T) {
	defer func(before string) { Version = before }(Version)
	Version = "v1.2.3"
	for writer, want := range map[string]bool{
		"": true, "damaged": true, "v0.9.0": true, "v1.2.0": true, "v1.2.9": true, "v1.2.3-rc.1": true, "v1.3.0-rc.1": false, "v1.3.0": false, "v2.0.0": false,
	} {
		err := CheckWriter(writer, "the plane in /x")
		if (err == nil) != want {
			t.Errorf("%q: %v", writer, err)
		}
		if err != nil && !strings.Contains(err.Error(), "the plane in /x") {
			t.Errorf("%q: %v", writer, err)
		}
	}
	for other, want := range map[string]string{"": "v1.2.3", "damaged": "v1.2.3", "v1.2.2": "v1.2.3", "v1.2.4": "v1.2.4"} {
		if got := Newest(other); got != want {
			t.Errorf("Newest(%q) = %s", other, got)
		}
	}
}
