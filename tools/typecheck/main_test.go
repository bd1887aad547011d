package main

import (
	"os"
	"path/filepath"
	"testing"
)

// TestRun: a function of another system is an error in a package, in its test and in a package that one of them imports, and in no other
// one.
func TestRun(t *testing.T) {
	const linuxOnly = "\n\nimport \"syscall\"\n\nfunc _() { _ = syscall.Unshare }\n"
	for file, wantErr := range map[string]bool{
		"checked/linux.go":       true,
		"checked/linux_test.go":  true,
		"imported/linux.go":      true,
		"imported/linux_test.go": false,
		"fortests/linux.go":      true,
		"other/linux.go":         false,
		"checked/linux_linux.go": false,
	} {
		t.Run(file, func(t *testing.T) {
			folder := t.TempDir()
			for name, content := range map[string]string{
				"go.mod":               "module example.com/m\n\ngo 1.26\n",
				"checked/checked.go":   "package checked\n\nimport _ \"example.com/m/imported\"\n",
				"checked/x_test.go":    "package checked_test\n\nimport _ \"example.com/m/fortests\"\n",
				"imported/imported.go": "package imported\n",
				"fortests/fortests.go": "package fortests\n",
				"other/other.go":       "package other\n",
				file:                   "package " + filepath.Dir(file) + linuxOnly,
			} {
				path := filepath.Join(folder, name)
				if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			t.Setenv("GOOS", "windows")
			if err := run(folder, []string{"./checked"}); (err != nil) != wantErr {
				t.Errorf("found the error %v, expected one: %v", err, wantErr)
			}
		})
	}
}
