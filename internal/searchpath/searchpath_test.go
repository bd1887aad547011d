package searchpath

import (
	"os"
	"testing"
)

func TestComplete(t *testing.T) {
	for before, want := range map[string]string{
		"":                                "/usr/local/sbin:/usr/sbin:/sbin",
		"/usr/local/bin:/usr/bin:/bin":    "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
		"/opt/sbin:/usr/sbin:/usr/bin":    "/opt/sbin:/usr/sbin:/usr/bin:/usr/local/sbin:/sbin",
		"/sbin:/usr/sbin:/usr/local/sbin": "/sbin:/usr/sbin:/usr/local/sbin",
	} {
		t.Setenv("PATH", before)
		if Complete(); os.Getenv("PATH") != want {
			t.Errorf("PATH %q became %q, want %q", before, os.Getenv("PATH"), want)
		}
	}
}
