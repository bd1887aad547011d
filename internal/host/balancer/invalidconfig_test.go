package balancer

import (
	"os"
	"path/filepath"
	"testing"
)

// The balancer ignores an unreadable configuration and applies the next valid one.
func TestDamagedConfiguration(t *testing.T) {
	one, two := apiServer(t, "one", ready(200)), apiServer(t, "two", ready(200))
	f := start(t, fast, one)
	f.awaitHealthy(1)
	for name, content := range map[string]string{"empty": "", "cut off": `{"listen":["`, "garbage": "\x00\x00", "another type": `["one"]`} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(f.dir, ConfigFile)
			if err := os.WriteFile(path+".new", []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(path+".new", path); err != nil {
				t.Fatal(err)
			}
			if got, err := f.get(); err != nil || got != "one" {
				t.Errorf("with a damaged configuration: %q, %v", got, err)
			}
			f.configure(one, two)
			f.awaitHealthy(2)
			f.configure(one)
			f.awaitHealthy(1)
		})
	}
}
